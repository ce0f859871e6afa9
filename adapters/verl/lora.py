"""An adapter (LoRA) in place of all weights: what a job implies for verl, which adapter vLLM's HTTP server samples
with, and whether it is the trainer's: the log-probabilities of both are compared before each step.

Invariant: once weights were synced, every request over HTTP is sampled with the adapter that came last, unless the
swarm server names a kept version: then with that one's, or not at all. What vLLM keeps of a prompt is of one version.
Compared are only tokens that vLLM says to have sampled with the trainer's present weights, and only where the trainer
finds a token likelier than vLLM did. Whatever holds an answer to a form (a JSON schema, a forced tool call) leaves
fewer tokens to choose from and makes each of them likelier in vLLM; other weights err in both directions.

verl gives its adapter to its own calls of vLLM alone; a request over HTTP would be answered by the base model. It loads
each version into vLLM under the same number, and vLLM keeps the keys and values of a prompt by the adapter's name, so
there is a new name after each sync. Written against vLLM 0.24 and 0.28, where nobody but the HTTP server can reach the
table in which it looks up the adapter of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from adapters.verl.causes import VllmDiedError
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.kept_adapters import BASE, MOST_KEPT, adapter_folder, kept_version

logger = logging.getLogger(__name__)

#: Adapters that a batch of vLLM may hold: the newest, and one of a kept version.
ADAPTERS = 2
#: More than are ever in memory: what vLLM drops by itself may be the newest, which it cannot read again.
ROOM = MOST_KEPT + 2

_FILE = "adapter_model.safetensors"
MODEL = "actor_rollout_ref.model"

#: Of the tokens, so many may differ by more: a token that was sampled as the weights changed has either version.
OUTLIERS = 0.1
#: Fewer tokens say nothing.
MIN_TOKENS = 32
#: The difference of log-probabilities that is allowed, by the type that vLLM computes in. With float32 it is 1e-5 where
#: the weights are the same. With others, rounding alone makes some hundredths.
TOLERANCES = {"float32": 1e-3}
ROUNDED_TOLERANCE = 0.2


def lora_values(job: TrainJob) -> dict[str, Any]:
    """What ``job.lora`` implies, as dotted verl keys."""
    if job.lora is None:
        return {f"{MODEL}.lora_rank": 0}
    targets = job.lora.targets
    return {
        f"{MODEL}.lora_rank": job.lora.rank,
        f"{MODEL}.lora_alpha": job.lora.alpha,
        f"{MODEL}.target_modules": targets if isinstance(targets, str) else list(targets),
    }


def syncs_adapter(config: Any) -> bool:
    """Whether vLLM gets an adapter and no whole weights, by verl's full configuration."""
    model = config.actor_rollout_ref.model
    return model.lora_rank > 0 and not model.lora.merge


@contextmanager
def targets_by_their_name() -> Generator[None]:
    """What PEFT says of target modules is said of the job's field.

    Raises:
        ConfigError: the model has no such layers, or they can have no adapter.
    """
    try:
        yield
    except ValueError as exc:
        if "target module" not in str(exc).lower().replace("_", " "):
            raise
        raise ConfigError(f"job.lora.targets: {' '.join(str(exc).split())}", param="lora") from exc


class _Kept(NamedTuple):
    """The adapter of a kept version in vLLM, and the inode and time of the file that it was read from."""

    request: Any
    file: tuple[int, int]


class PolicyAdapter:
    """The adapters that requests are sampled with in a process that serves vLLM, for as long as that lives.

    Args:
        serving: vLLM's class, whose ``_maybe_get_adapters`` looks up the adapter of a request and is replaced, and
            whose ``_check_model`` is wrapped.
        engine: vLLM's.
        run_dir: has the adapters of kept versions.
    """

    def __init__(self, serving: Any, engine: Any, run_dir: Path) -> None:
        # until the first sync vLLM has none, and the base model is the policy
        self._request: Any = None
        self._changes = 0
        self._engine = engine
        self._run_dir = run_dir
        self._kept: dict[int, _Kept] = {}
        self._loads = 0
        self._loading = asyncio.Lock()
        #: requests that were checked and are not answered yet, by version and identity: vLLM may know them only later
        self._asking: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()
        check = serving._check_model

        async def check_model(serving: Any, request: Any) -> Any:
            if (version := kept_version(request.model)) is None:
                return await check(serving, request)
            try:
                await self._load(version)
            except Exception as exc:  # whatever vLLM raises: this request is refused, and no other
                # what it says may name folders, and callers read this
                logger.warning("the adapter of the kept version %s cannot be loaded", version, exc_info=True)
                message = f"its adapter cannot be loaded ({type(exc).__name__}, see the engine's log)"
                if _is_whole(adapter_folder(self._run_dir, version)):
                    # room or the engine is lacking, and later it may not
                    return serving.create_error_response(message, "ConflictError", HTTPStatus.CONFLICT, "model")
                return serving.create_error_response(message, "NotFoundError", HTTPStatus.NOT_FOUND, "model")
            self._asking[version, id(request)] = request
            return None

        def adapter(_: Any, request: Any, *__: Any, **___: Any) -> Any:
            version = kept_version(request.model)
            if version is None:
                return self._request
            return None if version == BASE else self._kept[version].request

        serving._check_model = check_model
        serving._maybe_get_adapters = adapter

    def change(self, version: int) -> None:
        """From now on requests get the adapter that verl has loaded, which is of this policy version; those that
        vLLM holds get it too, since it has the number of the one before."""
        from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_PATH
        from vllm.lora.request import LoRARequest

        # a trainer that goes back to a checkpoint trains its versions again, with other weights
        self._changes += 1
        self._request = LoRARequest(f"policy@{version}.{self._changes}", VLLM_LORA_INT_ID, VLLM_LORA_PATH)

    async def _load(self, version: int) -> None:
        """Have vLLM hold the adapter of a kept version as it is on disk now; whatever is wrong with it is raised."""
        if version == BASE:
            return
        async with self._loading:
            folder, loaded = adapter_folder(self._run_dir, version), self._kept.get(version)
            try:
                stat = (folder / _FILE).stat()
                file = (stat.st_ino, stat.st_mtime_ns)
            except FileNotFoundError:
                # requests may have waited until it was removed
                if loaded is None:
                    raise
                file = loaded.file
            if loaded is not None and loaded.file == file:
                # the last that was asked for is the last to go
                self._kept[version] = self._kept.pop(version)
                return
            if loaded is not None:
                await self._forget(version)
            elif len(self._kept) == MOST_KEPT:
                idle = [held for held in self._kept if not self._answers(held)]
                if not idle:
                    raise RuntimeError(f"{MOST_KEPT} other versions answer, and no more fit")
                await self._forget(idle[0])
            self._kept[version] = _Kept(await self._added(version, folder), file)

    async def _added(self, version: int, folder: Path) -> Any:
        from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
        from vllm.lora.request import LoRARequest

        self._loads += 1
        request = LoRARequest(f"kept@{version}.{self._loads}", VLLM_LORA_INT_ID + self._loads, str(folder))
        await self._engine.add_lora(request)
        return request

    async def _forget(self, version: int) -> None:
        """Have vLLM drop an adapter; while an answer is sampled with it, vLLM would read its file again, or die."""
        if self._answers(version):
            raise RuntimeError(f"the version {version} still answers")
        await self._engine.remove_lora(self._kept.pop(version).request.lora_int_id)

    def _answers(self, version: int) -> bool:
        name = self._kept[version].request.lora_name
        running = list(self._engine.output_processor.request_states.values())
        return any(state.lora_name == name for state in running) or any(asked == version for asked, _ in self._asking)


def _is_whole(folder: Path) -> bool:
    """Whether the adapter in ``folder`` is there and can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / _FILE, "pt") as tensors:
            return bool(tensors.keys())
    except (OSError, SafetensorError):
        return False


class StaleAdapterError(VllmDiedError):
    """vLLM samples with other weights than the trainer has: what it sampled must not be trained."""


def allowed_difference(config: Any) -> float | None:
    """The difference that is allowed, by verl's full configuration; ``None`` where nothing is compared: without an
    adapter, where the app's sampling makes other probabilities, and where verl takes those of vLLM for its own."""
    correction = config.algorithm.rollout_correction
    compared = (
        syncs_adapter(config) and config.trainer.sampling == "trainer" and not (correction and correction.bypass_mode)
    )
    return TOLERANCES.get(str(config.actor_rollout_ref.rollout.dtype), ROUNDED_TOLERANCE) if compared else None


def sampling_difference(
    trained: npt.NDArray[Any],
    sampled: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    versions: npt.NDArray[Any],
    version: int,
) -> float | None:
    """By how much the trainer finds tokens likelier than vLLM did: all but :data:`OUTLIERS` by less. ``None`` where
    fewer than :data:`MIN_TOKENS` can be compared.

    Args:
        trained: log-probabilities by the trainer's present weights, float [T], of the tokens of all rows.
        sampled: those that vLLM sampled with, float [T].
        mask: whether vLLM sampled the token, [T].
        versions: of the policy that sampled it, int [T].
        version: the present one.
    """
    compared = mask.astype(bool) & (versions == version)
    if np.count_nonzero(compared) < MIN_TOKENS:
        return None
    return max(0.0, float(np.quantile((trained - sampled)[compared], 1 - OUTLIERS)))


def check_agreement(far: float, allowed: float, version: int) -> None:
    """Raise :class:`StaleAdapterError` if the :func:`sampling_difference` is more than is allowed."""
    if far > allowed:
        raise StaleAdapterError(
            f"vLLM does not sample with the adapter of version {version}: of the tokens that it says to have sampled "
            f"with it, {OUTLIERS:.0%} have log-probabilities that are off by more than {far:.2g} (allowed: {allowed:g})"
        )
