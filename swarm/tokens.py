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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, structs, to_builtins
from numpy.typing import NDArray

from swarm.measures import REPETITION, SPREAD, TASKS, TASKS_WITH_SIGNAL, TRAIN, MetricSums

# no NDArray[...]: of numpy 2.5 on, that is an alias that msgspec resolves to another type, for which there is no reader
TokenIds = np.ndarray[Any, np.dtype[np.int32]]
LossMask = np.ndarray[Any, np.dtype[np.bool_]]
LogProbs = np.ndarray[Any, np.dtype[np.float32]]
_Count = Annotated[int, Meta(ge=1)]
#: (index into ``response_ids``, policy version of the tokens from there on), ascending, the first index is 0; empty
#: where one version sampled all, or it is not known which: then as if the oldest did
VersionRuns = list[tuple[int, int]]

#: How a call's prompt treats what the same conversation's earlier answer sampled: there is none that the server knows
#: (``new``), the prompt begins with its very tokens (``kept``), it does not although the messages do (``lost``: the
#: chat template renders that answer to another text), or the caller gave another answer back than it got (``edited``).
#: Of a call that its caller's SDK repeats, nothing else counts (``again``): an answer to this prompt went astray.
History = Literal["new", "kept", "lost", "edited", "again"]
#: Field of a chat request to our vLLM: the token ids with which the prompt shall begin, where its text allows it; see
#: :mod:`adapters.verl.token_in`.
EARLIER_IDS = "swarm_earlier_ids"
#: The stop reason of an answer that our vLLM aborted, whatever its finish reason: :mod:`adapters.verl.replicas`.
ABORTED = "swarm_aborted"
#: tokens at the end of an episode in which repetition shows
_END_TOKENS = 256


def _read(wanted: np.dtype[Any], kinds: str, types: frozenset[type], value: Any) -> NDArray[Any]:
    """A read-only array of a list of ``types``, of an array of one of the ``kinds``, or of the raw bytes of one.

    It raises :class:`ValueError` for anything else, and for integers that do not fit.
    """
    if type(value) is np.ndarray and value.dtype == wanted and value.ndim == 1 and not value.flags.writeable:
        # it was read before
        return value
    try:
        with np.errstate(over="ignore"):
            if types and isinstance(value, list):
                # numpy would take a truth value among numbers for a number
                if not types.issuperset(set(map(type, value))):
                    raise ValueError("not a sequence of numbers")
                array: NDArray[Any] = np.fromiter(value, wanted, len(value))
            else:
                numbers = np.frombuffer(value, wanted) if isinstance(value, bytes) else np.asarray(value)
                if numbers.ndim != 1 or (numbers.dtype.kind not in kinds and numbers.size):
                    raise ValueError("not a sequence of numbers")
                array = numbers.astype(wanted, copy=False)
                if array is not numbers and wanted.kind != "f" and not (array == numbers).all():
                    raise OverflowError
    except OverflowError:
        raise ValueError(f"numbers that do not fit into {wanted}") from None
    if array.flags.writeable:
        # a view: the caller's own array stays writable
        array = array.view()
        array.flags.writeable = False
    return array


token_ids = partial(_read, np.dtype(np.int32), "iu", frozenset((int, np.int32)))
#: numpy reads a list of truth values, or of zeros and ones, itself
loss_mask = partial(_read, np.dtype(np.bool_), "biu", frozenset())
logprobs = partial(_read, np.dtype(np.float32), "iuf", frozenset((int, float, np.float32)))
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
    token sampled). The policy versions are trainer steps: the oldest and newest weights that sampled a token, and
    ``versions`` says which ones sampled which.
    """

    call_id: str
    min_policy_version: int
    max_policy_version: int
    versions: VersionRuns = []
    finish_reason: str
    history: History = "new"


class Timeline(_Arrays, frozen=True, kw_only=True, eq=False, gc=False):
    """One linear token sequence with its loss mask.

    ``prompt_ids`` [P]; ``response_ids``, ``response_mask`` and ``logprobs`` [R], with R > 0. The mask is true on tokens
    that the policy sampled and false on tool or user tokens in between, whose log-probability is 0.0, and whose version
    in ``versions`` means nothing.
    """

    response_mask: LossMask
    min_policy_version: int
    max_policy_version: int
    versions: VersionRuns = []
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

    def token_versions(self) -> TokenIds:
        """The policy version of each token of ``response_ids`` [R]."""
        versions = np.full(len(self.response_ids), self.min_policy_version, np.int32)
        for begin, version in self.versions:
            versions[begin:] = version
        return versions


class TokenCounts(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """What became of all tokens of an episode's recorded calls, over all its timelines.

    ``sampled == trained + repeated``, unless the episode is dropped: then nothing of ``sampled`` is trained.

    The fields are those of :class:`swarm.protocol.EpisodeTokens`. The merged rows have ``prompts + masked + trained``
    tokens; ``kept``, ``lost`` and ``edited`` count calls by their :data:`History`.
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
    """All timelines of one finished episode with its reward, and its ``credit``: what its advantage is beside that of
    its reward in the group. Both are finite."""

    episode_uuid: str
    task_id: str
    reward: float
    credit: float = 0.0
    timelines: Annotated[list[Timeline], Meta(min_length=1)]
    num_calls: _Count
    is_success: bool | None = None
    log_metrics: dict[str, float] = {}
    tokens: TokenCounts = TokenCounts()

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward + self.credit):
            raise ValueError(f"reward and credit must be finite, not {self.reward} and {self.credit}")

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

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of all its groups, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def batch_metrics(batch: TrainBatch, step: int) -> dict[str, float]:
    """Our metrics of the batch of ``step``, over all its episodes (see :mod:`swarm.measures`; the deviation is the
    population's); what merging made of its calls, and by how many weight syncs the sampled tokens are older than the
    weights that ``step`` began with.

    ``swarm/tasks_with_signal`` counts the tasks whose rewards differ or that have a credit: nothing is learned from the
    others.
    ``swarm/lost_history`` is the share of the calls whose prompt does not begin with the tokens of the conversation's
    earlier answer, among those that go on from one.
    """
    trajectories = batch.trajectories
    sums = MetricSums()
    for trajectory in trajectories:
        sums.add(
            trajectory.reward,
            trajectory.is_success,
            trajectory.num_calls,
            trajectory.sampled_tokens,
            trajectory.log_metrics,
        )
    names = TokenCounts.__struct_fields__
    counts = {name: sum(getattr(trajectory.tokens, name) for trajectory in trajectories) for name in names}
    timelines = [timeline for trajectory in trajectories for timeline in trajectory.timelines]
    ages = step - 1 - np.concatenate([timeline.token_versions()[timeline.response_mask] for timeline in timelines])
    merging = {
        "calls": counts["calls"],
        "timelines": counts["timelines"],
        "unmerged_tokens": counts["unmerged"],
        "merged_tokens": counts["prompts"] + counts["masked"] + counts["trained"],
        "lost_history": counts["lost"] / max(1, counts["kept"] + counts["lost"]),
        "staleness_mean": ages.mean(),
        "staleness_max": ages.max(),
    }
    return {
        **sums.means(TRAIN),
        **{TRAIN + name: float(value) for name, value in merging.items()},
        SPREAD: statistics.pstdev(trajectory.reward for trajectory in trajectories),
        REPETITION: statistics.fmean(_repetition(trajectory) for trajectory in trajectories),
        f"{TRAIN}episodes": float(len(trajectories)),
        TASKS: float(len(batch.groups)),
        TASKS_WITH_SIGNAL: float(
            sum(
                len({trajectory.reward for trajectory in group.trajectories}) > 1
                or any(trajectory.credit for trajectory in group.trajectories)
                for group in batch.groups
            )
        ),
    }


def _repetition(trajectory: Trajectory) -> float:
    """Of the last ``_END_TOKENS`` sampled ones, the share of the four-token sequences that occurred before (seq-rep-4
    of Welleck et al. 2019, arXiv 1908.04319); 0 for fewer than four."""
    sampled = [timeline.response_ids[timeline.response_mask] for timeline in trajectory.timelines]
    end = np.concatenate(sampled)[-_END_TOKENS:].tolist()
    fours = [*zip(end, end[1:], end[2:], end[3:], strict=False)]
    return 1 - len(set(fours)) / len(fours) if fours else 0.0


def join_runs(runs: Sequence[tuple[int, int]]) -> VersionRuns:
    """``runs`` in order, without those that hold no token or go on with the version before."""
    joined: VersionRuns = []
    for begin, version in runs:
        if joined and joined[-1][0] == begin:
            joined.pop()
        if not joined or joined[-1][1] != version:
            joined.append((begin, version))
    return joined


@dataclass
class CallPart:
    """The tokens of a choice that one request to vLLM sampled, from ``begin`` on; ``request`` is its id.

    When it began, ``version`` was served and ``syncs`` weight syncs were over.
    """

    version: int
    begin: int
    syncs: int
    request: str = ""


#: how many tokens each request that vLLM knows has: request id -> choice -> tokens; more than there are if it has ended
Sampled = Mapping[str, Mapping[int, int]]


class WeightSyncs:
    """The last weight syncs over which vLLM kept its requests: they tell which weights sampled which token.

    Invariant: a version is given only where it is certain.
    """

    def __init__(self, kept: int = 64) -> None:
        self._last: deque[tuple[int, Sampled | None]] = deque(maxlen=kept)
        self._count = 0

    def finish(self, version: int, sampled: Sampled | None) -> None:
        """vLLM has the weights of ``version``; ``sampled`` is what it had sampled before, if that is known."""
        self._count += 1
        self._last.append((version, sampled))

    def begin(self, version: int, begin: int = 0) -> CallPart:
        """A request that is about to be sent, while ``version`` is served."""
        return CallPart(version, begin, self._count)

    def runs(self, parts: Sequence[CallPart], choice: int, tokens: int, version: int) -> list[tuple[int, int]]:
        """Who sampled the ``tokens`` of a choice, in ascending runs that may be empty; no run if that is not known.

        Args:
            parts: the requests that sampled the choice, in order.
            choice: its number in the first of them; the others have one choice.
            tokens: how many tokens it has.
            version: what is served at its end.
        """
        runs: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            following = parts[number + 1 :]
            end, syncs_at_end = (following[0].begin, following[0].syncs) if following else (tokens, self._count)
            passed = syncs_at_end - part.syncs
            if self._count - part.syncs > len(self._last):
                return []
            runs.append((part.begin, part.version))
            first = len(self._last) - (self._count - part.syncs)
            for newer, sampled in list(self._last)[first : first + passed]:
                if sampled is None:
                    return []
                # a request that vLLM did not know had not reached it
                sampled_before = sampled.get(part.request, {}).get(choice if number == 0 else 0, 0)
                if part.begin + sampled_before >= end:
                    # it had ended, and is not told of again
                    break
                runs.append((part.begin + sampled_before, newer))
            served = self._last[first + passed - 1][0] if passed else part.version
            if not following and served != version:
                return []
        return runs
