"""verl's FSDP engine, which computes a prefix that rows of a mini-batch share once; its results are those of verl.

The rows of a mini-batch become tries of at most as many tokens as a micro-batch of rows has, one call of the
model each: for the update, the old and the reference log-probabilities alike. Logits are computed where a sampled token
follows; elsewhere log-probabilities and entropy are 0, which no loss and no metric reads. verl's own rows are computed
where the estimate says that they cost less, where a batch asks for more than log-probabilities and entropy, and for a
model that three short rows show to give other results.

Invariant: all data-parallel ranks decide alike and call the model equally often, because FSDP gathers and reduces in
each call. A rank whose rows fit fewer parts than another's cuts more of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func

from adapters.verl.tree.attention import TREE, Nodes, UnsupportedAttentionError, token_log_probs
from adapters.verl.tree.trie import MicroBatch, ModelShape, Tokens, ordered, pack, part_cost, rows_cost, split

log = logging.getLogger(__name__)

#: What a batch may ask for that only verl's rows give.
ROWS_ONLY = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
#: Two prefixes in common, one row a prefix of another.
PROBE = ([5, 6, 7, 8, 9], [5, 6, 7, 4, 3, 2], [5, 6, 7, 8])
#: The largest difference of logits on these rows, in terms of the largest logit.
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@dataclass
class Savings:
    """What was computed since the last step's report.

    Attributes:
        tokens: in the rows of all updates.
        unique_tokens: that the updates computed; a prefix counts once for each part that holds it.
        seconds: estimated, for updates, old and reference log-probabilities together: the measured time of the tries x
            (estimated cost of the rows / estimated cost of the tries - 1).
    """

    tokens: int = 0
    unique_tokens: int = 0
    seconds: float = 0.0


class SharedPrefixEngine(FSDPEngineWithLMHead):
    """verl's engine for language models; ``shared_prefixes`` turns the tries on."""

    shared_prefixes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: shared with the engine of the reference model, whose work belongs to the same steps
        self.savings = Savings()
        # the part that is computed now; without one, verl's rows are
        self._part: MicroBatch | None = None

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False):
        """As verl's: a dict with ``model_output`` (nested, in the order of the rows), ``loss`` and ``metrics``."""
        fits = self.shared_prefixes and self._suits(data) and self._model_suits
        plan = self._plan(data, forward_only) if fits else None
        tokens = data["input_ids"].values().numel()
        if not forward_only:
            self.savings.tokens += tokens
            self.savings.unique_tokens += sum(len(part.trie.ids) for part in plan[0]) if plan else tokens
        if plan is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        parts, ratio = plan
        started = time.perf_counter()
        output = self._forward_backward_parts(data, parts, loss_function, forward_only)
        self.savings.seconds += (time.perf_counter() - started) * (ratio - 1)
        return output

    def take_savings(self) -> dict[str, float]:
        """The metrics of :attr:`savings` of all ranks, which then begin anew: tokens in all, seconds of the mean."""
        saved = self.savings
        sums = _float64(saved.tokens, saved.unique_tokens, saved.seconds)
        torch.distributed.all_reduce(sums, group=self.get_data_parallel_group())
        saved.tokens, saved.unique_tokens, saved.seconds = 0, 0, 0.0
        tokens, unique_tokens, seconds = sums.tolist()
        return {
            "swarm/tokens": tokens,
            "swarm/unique_tokens": unique_tokens,
            "swarm/prefix_seconds_saved": seconds / self.get_data_parallel_size(),
        }

    def _forward_backward_parts(
        self, data: Any, parts: list[MicroBatch], loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> dict[str, Any]:
        group = self.get_data_parallel_group()
        trained = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(trained, group=group)
        # parts differ in their numbers of rows, as verl's micro-batches do when they are packed by tokens
        tu.assign_non_tensor(
            data,
            sp_size=1,
            dp_size=self.get_data_parallel_size(),
            batch_num_tokens=trained.item(),
            use_dynamic_bsz=True,
        )
        keep_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        outputs: list[dict[str, Any]] = []
        # with gradient checkpoints the backward pass computes attention again
        with self._trie_attention():
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                sync = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
                self._part = part
                with torch.set_grad_enabled(not forward_only), sync:
                    rows = tu.index_select_tensor_dict(data, part.rows)
                    loss, output = self.forward_step(rows, loss_function, forward_only)
                    if not forward_only:
                        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if not keep_output:
                    del output["model_output"]
                outputs.append(output)
        return postprocess_batch_func(outputs, [part.rows for part in parts], data)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._part is None:
            return super().prepare_model_inputs(micro_batch)
        return self._inputs(self._part), {}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Log-probabilities, and entropy where the batch asks for it, nested like the rows of ``micro_batch``."""
        part = self._part
        if part is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        with_entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", False)
        index, labels, targets = (_to_device(tensor) for tensor in (part.index, part.labels, part.targets))
        log_probs, entropy = token_log_probs(
            output.logits[0],
            index,
            labels,
            temperature=float(micro_batch["temperature"]),
            with_entropy=with_entropy,
        )
        offsets = micro_batch["input_ids"].offsets()

        def rows(values: torch.Tensor) -> torch.Tensor:
            flat = torch.zeros(int(offsets[-1]), device=values.device).index_put((targets,), values)
            return torch.nested.nested_tensor_from_jagged(flat, offsets)

        return {"log_probs": rows(log_probs)} | ({"entropy": rows(entropy[index])} if with_entropy else {})

    def _plan(self, data: Any, forward_only: bool) -> tuple[list[MicroBatch], float] | None:
        """The parts of a mini-batch and how many times as much its rows cost; ``None`` where they cost less."""
        rows = [row.cpu().numpy() for row in data["input_ids"].unbind()]
        masks = [mask.cpu().numpy() for mask in data["response_mask"].unbind()]
        sampled = [np.flatnonzero(mask) + len(row) - len(mask) for row, mask in zip(rows, masks, strict=True)]
        lengths = [len(row) for row in rows]
        micro_batch, budget = self._limits(max(lengths), forward_only)
        layout = ordered(rows)
        count = len(split(layout, budget))
        group = self.get_data_parallel_group()
        if (ranks := self.get_data_parallel_size()) > 1:
            counts: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(counts, count, group)
            count = max(counts)
        parts = [pack(rows, sampled, members) for members in split(layout, budget, at_least=count)]
        packed = "masked" if find_spec("flash_attn") is None else "apart"
        by_rows = rows_cost(self._shape, lengths, micro_batch, packed if self.use_remove_padding else "padded")
        by_tries = sum(part_cost(self._shape, part) for part in parts)
        costs = _float64(by_rows, by_tries)
        torch.distributed.all_reduce(costs, group=group)
        ratio = float(costs[0] / costs[1])
        return (parts, ratio) if ratio > 1 else None

    def _limits(self, longest: int, forward_only: bool) -> tuple[int, int]:
        """The most rows of a micro-batch, and the tokens that they have when each is as long as the longest."""
        config = self.engine_config
        if config.use_dynamic_bsz:
            tokens = config.infer_max_token_len_per_gpu if forward_only else config.max_token_len_per_gpu
            return max(1, tokens // longest), max(tokens, longest)
        rows = config.infer_micro_batch_size_per_gpu if forward_only else config.micro_batch_size_per_gpu
        return rows, rows * longest

    def _suits(self, data: Any) -> bool:
        """Whether a batch asks for nothing but log-probabilities and entropy of text, each sequence on one device."""
        media = tu.get(data, "multi_modal_inputs", [])
        return not (
            self.ulysses_sequence_parallel_size > 1
            or any(tu.get_non_tensor_data(data, key, False) for key in ROWS_ONLY)
            or isinstance(data["temperature"], torch.Tensor)
            or data["position_ids"].dim() != 2
            or any(media)
        )

    @cached_property
    def _shape(self) -> ModelShape:
        config = self.module.config.get_text_config()
        vocabulary = config.vocab_size * config.hidden_size
        tables = vocabulary if config.tie_word_embeddings else 2 * vocabulary
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelShape(
            parameters=sum(parameter.numel() for parameter in self.module.parameters()) - tables,
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            layers=config.num_hidden_layers,
            attention=config.num_attention_heads * width,
        )

    @cached_property
    def _model_suits(self) -> bool:
        """Whether the model gives the same logits for tries as for rows; shown once, on :data:`PROBE`."""
        training = self.module.training
        # dropout shows in training only
        self.module.train()
        try:
            with torch.no_grad():
                difference = self._probe()
        # what cannot be compiled for a GPU is a RuntimeError
        except (UnsupportedAttentionError, TypeError, RuntimeError) as exc:
            difference, reason = float("inf"), str(exc)
        else:
            reason = f"its logits differ by {difference:.1e} of the largest"
        finally:
            self.module.train(training)
        tolerance = PROBE_TOLERANCE[self._autocast_dtype]
        if suits := difference <= tolerance:
            return suits
        log.warning("Shared prefixes are computed for each row, because the model does not fit a trie: %s", reason)
        return suits

    def _probe(self) -> float:
        rows = [np.array(row) for row in PROBE]
        part = pack(rows, [np.arange(1, len(row)) for row in rows], list(range(len(rows))))
        kind = self._autocast_dtype
        with torch.autocast(get_device_name(), kind, enabled=kind != torch.float32):
            with self._trie_attention():
                logits = self.module(**self._inputs(part), use_cache=False).logits[0]
            by_rows = [
                self.module(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
                for ids, positions in ((_to_device(row)[None], _to_device(np.arange(len(row)))[None]) for row in rows)
            ]
        wanted = torch.cat([logits[:-1] for logits in by_rows])
        logits = logits[_to_device(part.index)]
        if logits.shape != wanted.shape:
            return float("inf")
        return float((logits - wanted).abs().max() / wanted.abs().max())

    def _inputs(self, part: MicroBatch) -> dict[str, Any]:
        return {
            "input_ids": _to_device(part.trie.ids)[None],
            "position_ids": _to_device(part.trie.positions)[None],
            "attention_mask": None,
            "logits_to_keep": _to_device(part.needed),
            "trie_nodes": Nodes(part.trie.nodes),
        }

    @contextmanager
    def _trie_attention(self) -> Iterator[None]:
        """Within, the model computes parts."""
        config = self.module.config
        own = config._attn_implementation
        config._attn_implementation = TREE
        try:
            yield
        finally:
            config._attn_implementation, self._part = own, None


def _to_device(values: Tokens) -> torch.Tensor:
    return torch.from_numpy(values).to(get_device_id())


def _float64(*values: float) -> torch.Tensor:
    """Where the ranks' collectives take it."""
    return torch.tensor(values, dtype=torch.float64, device=get_device_id())
