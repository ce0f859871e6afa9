"""Token data: recorded calls, and the timelines, trajectories and batches made of them; tokens are in numpy arrays.

Invariant: token data is exactly what vLLM sampled, never re-tokenised text. Log-probabilities are float32: that is what
vLLM computes (so its JSON numbers convert without loss) and what verl trains on. Every array is one-dimensional and
read-only, so that calls, timelines and batches can share it.

Python's garbage collector does not track these structs (``gc=False``): nothing here can be part of a cycle, and a
server keeps tens of thousands of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, structs, to_builtins
from numpy.typing import NDArray

from swarm.metrics import TRAIN, MetricSums

TokenIds = NDArray[np.int32]
LossMask = NDArray[np.bool_]
LogProbs = NDArray[np.float32]
_Count = Annotated[int, Meta(ge=1)]

#: How a call's prompt treats what the same conversation's earlier answer sampled: there is none that the server knows
#: (``new``), the prompt begins with its very tokens (``kept``), it does not although the messages do (``lost``: the
#: chat template renders that answer to another text), or the caller gave another answer back than it got (``edited``).
History = Literal["new", "kept", "lost", "edited"]
#: Field of a chat request to our vLLM: the token ids with which the prompt shall begin, where its text allows it; see
#: :mod:`adapters.verl.token_in`.
EARLIER_IDS = "swarm_earlier_ids"


def _reader(dtype: type[np.generic], kinds: str, *types: type) -> Callable[[Any], NDArray[Any]]:
    """A function that makes a read-only array of a list of ``types``, of an array, or of the raw bytes of one.

    It raises :class:`ValueError` for an array of other ``kinds``, and for integers that do not fit.
    """
    allowed = frozenset(types)
    wanted = np.dtype(dtype)

    def convert(value: Any) -> NDArray[Any]:
        if isinstance(value, list) and wanted.kind != "b":
            # numpy would take a truth value among numbers for a number
            if not allowed.issuperset(set(map(type, value))):
                raise ValueError("not a sequence of numbers")
            return np.fromiter(value, wanted, len(value))
        given = np.frombuffer(value, wanted) if isinstance(value, bytes) else np.asarray(value)
        if given.ndim != 1 or (given.dtype.kind not in kinds and given.size):
            raise ValueError("not a sequence of numbers")
        if given.dtype == wanted:
            return given
        array = given.astype(wanted)
        if wanted.kind != "f" and not (array == given).all():
            raise OverflowError
        return array

    def read(value: Any) -> NDArray[Any]:
        try:
            with np.errstate(over="ignore"):
                array = convert(value)
        except OverflowError:
            raise ValueError(f"numbers that do not fit into {wanted}") from None
        if array.flags.writeable:
            # a view: the caller's own array stays writable
            array = array.view()
            array.flags.writeable = False
        return array

    return read


token_ids = _reader(np.int32, "iu", int, np.int32)
loss_mask = _reader(np.bool_, "biu")
logprobs = _reader(np.float32, "iuf", int, float, np.float32)
#: the function that makes arrays of each type
READERS: dict[Any, Callable[[Any], NDArray[Any]]] = {TokenIds: token_ids, LossMask: loss_mask, LogProbs: logprobs}


def as_lists(data: Struct) -> dict[str, Any]:
    """The fields of ``data`` with lists for arrays; a mask is of zeros and ones."""
    fields: dict[str, Any] = to_builtins(data, enc_hook=lambda array: (array + 0).tolist())
    return fields


class _Arrays(Struct, frozen=True, kw_only=True, eq=False, gc=False, forbid_unknown_fields=True):
    """A struct whose fields may be arrays; it can be made of lists as well."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: LogProbs

    def __post_init__(self) -> None:
        structs.force_setattr(self, "prompt_ids", token_ids(self.prompt_ids))
        structs.force_setattr(self, "response_ids", token_ids(self.response_ids))
        structs.force_setattr(self, "logprobs", logprobs(self.logprobs))
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.response_ids)} token ids but {len(self.logprobs)} log-probabilities")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )


class ModelCall(_Arrays, frozen=True, kw_only=True, eq=False, gc=False):
    """One completed sampling call of an episode, as vLLM reported it.

    ``prompt_ids`` has P token ids; ``response_ids`` and ``logprobs`` have R entries each (natural log, of the
    token sampled). The policy versions are trainer steps: the oldest and newest weights that sampled a token.
    """

    call_id: str
    min_policy_version: int
    max_policy_version: int
    finish_reason: str
    history: History = "new"


class Timeline(_Arrays, frozen=True, kw_only=True, eq=False, gc=False):
    """One linear token sequence with its loss mask.

    ``prompt_ids`` [P]; ``response_ids``, ``response_mask`` and ``logprobs`` [R], with R > 0. The mask is true on tokens
    that the policy sampled and false on tool or user tokens in between, whose log-probability is 0.0.
    """

    response_mask: LossMask
    min_policy_version: int
    max_policy_version: int
    num_calls: _Count

    def __post_init__(self) -> None:
        super().__post_init__()
        structs.force_setattr(self, "response_mask", loss_mask(self.response_mask))
        if not len(self.response_ids) == len(self.response_mask) > 0:
            raise ValueError("response_ids, response_mask and logprobs must have one length, above 0")

    @property
    def sampled_tokens(self) -> int:
        """How many of the tokens the policy sampled."""
        return int(np.count_nonzero(self.response_mask))


class TokenCounts(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """What became of all tokens of an episode's recorded calls, over all its timelines.

    ``sampled == trained + repeated``, unless the episode is dropped: then nothing of ``sampled`` is trained.

    Attributes:
        calls: recorded ones with a sampled token.
        timelines: that they were merged into; the trainer's rows.
        sampled: tokens that the policy sampled.
        trained: of these, in a timeline with mask 1.
        repeated: of these, sampled a second time in the same place: they are in the timeline once.
        masked: tokens between answers in the timelines: results of tools, later turns of the user.
        prompts: tokens of the timelines before their first answer.
        unmerged: tokens, prompts included, if each call was a row of its own; the merged rows have
            ``prompts + masked + trained``.
        kept, lost, edited: calls by their :data:`History`.
    """

    calls: int = 0
    timelines: int = 0
    sampled: int = 0
    trained: int = 0
    repeated: int = 0
    masked: int = 0
    prompts: int = 0
    unmerged: int = 0
    kept: int = 0
    lost: int = 0
    edited: int = 0


class Trajectory(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """All timelines of one finished episode with its reward, which is finite."""

    episode_uuid: str
    task_id: str
    reward: float
    timelines: Annotated[list[Timeline], Meta(min_length=1)]
    num_calls: _Count
    is_success: bool | None = None
    log_metrics: dict[str, float] = {}
    tokens: TokenCounts = TokenCounts()

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward must be finite, not {self.reward}")

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, in all timelines."""
        return sum(timeline.sampled_tokens for timeline in self.timelines)


class TrainGroup(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The finished episodes of one task: the unit over which GRPO computes its mean and deviation."""

    task_id: str
    trajectories: Annotated[list[Trajectory], Meta(min_length=1)]


class TrainBatch(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """What one training step consumes; ``batch_id`` identifies it for exactly-once accounting."""

    batch_id: str
    groups: Annotated[list[TrainGroup], Meta(min_length=1)]


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Our metrics of one batch, over all its episodes: see :mod:`swarm.metrics`; the deviation is the population's; and
    what merging made of its calls.

    ``swarm/lost_history`` is the share of the calls whose prompt does not begin with the tokens of the conversation's
    earlier answer, among those that go on from one.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    sums = MetricSums()
    for one in trajectories:
        sums.add(one.reward, one.is_success, one.num_calls, one.sampled_tokens, one.log_metrics)
    counts = [one.tokens for one in trajectories]
    kept, lost = sum(one.kept for one in counts), sum(one.lost for one in counts)
    merging = {
        "calls": sum(one.calls for one in counts),
        "timelines": sum(one.timelines for one in counts),
        "unmerged_tokens": sum(one.unmerged for one in counts),
        "merged_tokens": sum(one.prompts + one.masked + one.trained for one in counts),
        "lost_history": lost / (kept + lost) if lost else 0.0,
    }
    return {
        **sums.means(TRAIN),
        **{TRAIN + name: float(value) for name, value in merging.items()},
        f"{TRAIN}reward_std": statistics.pstdev(one.reward for one in trajectories),
        f"{TRAIN}episodes": float(len(trajectories)),
        f"{TRAIN}tasks": float(len(batch.groups)),
    }
