"""Whether vLLM samples with the weights that the trainer has: the log-probabilities of both are compared, step by step,
before the step is trained.

Invariant: only tokens count that vLLM says to have sampled with the trainer's present weights, and only where the
trainer finds a token likelier than vLLM did. Whatever holds an answer to a form (a JSON schema, a forced tool call)
leaves fewer tokens to choose from and makes each of them likelier in vLLM; other weights err in both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.verl.lora import syncs_adapter
from adapters.verl.replicas import VllmDiedError

#: Of the tokens, so many may differ by more: a token that was sampled as the weights changed has either version.
OUTLIERS = 0.1
#: Fewer tokens say nothing.
MIN_TOKENS = 32
#: The difference of log-probabilities that is allowed, by the type that vLLM computes in. With float32 it is 1e-5 where
#: the weights are the same. With others, rounding alone makes some hundredths.
TOLERANCES = {"float32": 1e-3}
ROUNDED_TOLERANCE = 0.2


class StaleAdapterError(VllmDiedError):
    """vLLM samples with other weights than the trainer has: what it sampled must not be trained."""


def tolerance(config: Any) -> float | None:
    """The difference that is allowed, by verl's full configuration; ``None`` where nothing is compared: without an
    adapter, where the app's sampling makes other probabilities, and where verl takes those of vLLM for its own."""
    correction = config.algorithm.rollout_correction
    compared = (
        syncs_adapter(config) and config.trainer.sampling == "trainer" and not (correction and correction.bypass_mode)
    )
    return TOLERANCES.get(str(config.actor_rollout_ref.rollout.dtype), ROUNDED_TOLERANCE) if compared else None


def difference(
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


def check(far: float, allowed: float, version: int) -> None:
    """Raise :class:`StaleAdapterError` if the ``difference`` is more than is allowed."""
    if far > allowed:
        raise StaleAdapterError(
            f"vLLM does not sample with the adapter of version {version}: of the tokens that it says to have sampled "
            f"with it, {OUTLIERS:.0%} have log-probabilities that are off by more than {far:.2g} (allowed: {allowed:g})"
        )
