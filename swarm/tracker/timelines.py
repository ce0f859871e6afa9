"""Merge the calls of one episode into timelines, comparing token ids only.

Invariant: every sampled token of every call is in exactly one timeline with mask 1, unless another call sampled the
same tokens after the same prompt, or the answer went astray and its caller asked again; nothing is ever joined that is
not an exact prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.tokens import ModelCall, Timeline, TokenCounts, join_runs

_Ids = NDArray[np.int32]


def merge_calls(calls: Sequence[ModelCall]) -> list[Timeline]:
    """The timelines of ``calls``, in the order in which each timeline's first call was recorded.

    A call whose prompt starts with all tokens of a timeline extends the longest such timeline: the tokens in between
    (tool results, the next user turn) get mask 0 and log-probability 0.0. A call whose prompt and response are a
    prefix of a timeline is absorbed. Any other call starts a timeline; calls without a sampled token add nothing, and
    neither do those whose answer went astray. The time is linear in the number of tokens of all calls.
    """
    calls = _delivered(calls)
    if len(calls) == 1:
        return _alone(calls[0])
    tree = _Tree()
    timelines: list[_Growing] = []
    # Short prompts first: parallel calls finish in any order, yet a call must be seen before those that continue it.
    # Of calls with one prompt the longest answer goes first, so that an answer that is its prefix is absorbed.
    order = sorted(range(len(calls)), key=lambda i: (len(calls[i].prompt_ids), -len(calls[i].response_ids)))
    for index in order:
        call = calls[index]
        if not len(call.response_ids):
            continue
        full = np.concatenate([call.prompt_ids, call.response_ids])
        match = tree.find(full, len(call.prompt_ids))
        if match.matched == len(full):
            # all prompts in that timeline are at most as long as this one: its tokens past our prompt are sampled
            match.holder().num_calls += 1
            continue
        timeline = match.extends
        if timeline is None:
            timeline = _Growing(index, call.prompt_ids)
            timelines.append(timeline)
        timeline.append(call)
        tree.insert(full, timeline)
    timelines.sort(key=lambda timeline: timeline.first_call)
    return [timeline.freeze() for timeline in timelines]


def count_tokens(calls: Sequence[ModelCall], timelines: Sequence[Timeline]) -> TokenCounts:
    """What became of the tokens of ``calls``: ``timelines`` are what is trained of them, none if nothing is."""
    sampling = [call for call in calls if len(call.response_ids)]
    sampled = sum([len(call.response_ids) for call in sampling])
    trained = sum([timeline.sampled_tokens for timeline in timelines])
    histories = [call.history for call in sampling]
    return TokenCounts(
        calls=len(sampling),
        timelines=len(timelines),
        sampled=sampled,
        trained=trained,
        repeated=sampled - trained if timelines else 0,
        masked=sum([len(timeline.response_ids) for timeline in timelines]) - trained,
        prompts=sum([len(timeline.prompt_ids) for timeline in timelines]),
        unmerged=sampled + sum([len(call.prompt_ids) for call in sampling]),
        kept=histories.count("kept"),
        lost=histories.count("lost"),
        edited=histories.count("edited"),
    )


def _delivered(calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Without the answers that an SDK's retry replaces: their caller never heard of them. Of several equal calls that
    are no retries it is not known which one was repeated, and all stay."""
    equal = {call.prompt_ids.tobytes(): list[int]() for call in calls if call.history == "again"}
    if not equal:
        return calls
    for index, call in enumerate(calls):
        equal.get(call.prompt_ids.tobytes(), []).append(index)
    astray: set[int] = set()
    for indexes in equal.values():
        retries = [index for index in indexes if calls[index].history == "again"]
        if len(indexes) == len(retries) + 1:
            astray |= {*indexes} - {retries[-1]}
    return [call for index, call in enumerate(calls) if index not in astray]


def _alone(call: ModelCall) -> list[Timeline]:
    """The timelines of an episode of one call, the most frequent kind; they share the call's arrays."""
    if not len(call.response_ids):
        return []
    timeline = Timeline(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        response_mask=np.ones(len(call.response_ids), np.bool_),
        logprobs=call.logprobs,
        min_policy_version=call.min_policy_version,
        max_policy_version=call.max_policy_version,
        versions=call.versions,
        num_calls=1,
    )
    return [timeline]


@dataclass
class _Growing:
    """A timeline in the making: the lists hold parts of its arrays, in order; ``length`` counts its tokens."""

    first_call: int
    prompt_ids: _Ids
    response_ids: list[_Ids] = field(default_factory=list[_Ids])
    mask: list[NDArray[np.bool_]] = field(default_factory=list[NDArray[np.bool_]])
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    versions: list[int] = field(default_factory=list[int])
    runs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_calls: int = 0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt_ids)

    def append(self, call: ModelCall) -> None:
        between, sampled = call.prompt_ids[self.length :], len(call.response_ids)
        self.response_ids += (between, call.response_ids)
        self.mask += (np.zeros(len(between), np.bool_), np.ones(sampled, np.bool_))
        self.logprobs += (np.zeros(len(between), np.float32), call.logprobs)
        self.versions += (call.min_policy_version, call.max_policy_version)
        self.num_calls += 1
        self.length += len(between)
        first = self.length - len(self.prompt_ids)
        runs = call.versions or [(0, call.min_policy_version)]
        self.runs += ((first + begin, version) for begin, version in runs)
        self.length += sampled

    def freeze(self) -> Timeline:
        runs = join_runs(self.runs)
        return Timeline(
            prompt_ids=self.prompt_ids,
            response_ids=np.concatenate(self.response_ids),
            response_mask=np.concatenate(self.mask),
            logprobs=np.concatenate(self.logprobs),
            min_policy_version=min(self.versions),
            max_policy_version=max(self.versions),
            versions=runs if len(runs) > 1 else [],
            num_calls=self.num_calls,
        )


@dataclass(slots=True)
class _Node:
    """A node of the radix tree: ``ids`` are on the edge that leads here; ``ends`` is the timeline that ends here."""

    ids: _Ids
    edges: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    ends: _Growing | None = None


@dataclass(slots=True)
class _Place:
    """How far a token sequence is in the tree, and the longest timeline that its prompt starts with."""

    matched: int
    node: _Node
    extends: _Growing | None

    def holder(self) -> _Growing:
        """A timeline that contains the matched tokens; every leaf ends one."""
        node = self.node
        while node.ends is None:
            node = next(iter(node.edges.values()))
        return node.ends


class _Tree:
    """Radix tree over the full ids of all timelines."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32))

    def find(self, full: _Ids, prompt_length: int) -> _Place:
        node, depth, extends = self._root, 0, None
        while depth < len(full):
            child = node.edges.get(int(full[depth]))
            if child is None:
                break
            common = _common(child.ids, full, depth)
            depth += common
            node = child
            if common < len(child.ids):
                break
            if child.ends is not None and depth <= prompt_length:
                extends = child.ends
        return _Place(depth, node, extends)

    def insert(self, full: _Ids, timeline: _Growing) -> None:
        """Add ``full``, which is not yet contained, as the ids of ``timeline``; its shorter end is forgotten."""
        node, depth = self._root, 0
        while True:
            goes_on = node.ends is timeline
            if goes_on:
                node.ends = None
            token = int(full[depth])
            child = node.edges.get(token)
            if child is None:
                if goes_on and not node.edges:
                    # a longer edge: a path with a node for each turn takes long to walk
                    node.ids, node.ends = full[depth - len(node.ids) :], timeline
                else:
                    node.edges[token] = _Node(full[depth:], ends=timeline)
                return
            common = _common(child.ids, full, depth)
            if common < len(child.ids):
                lower = _Node(child.ids[common:], child.edges, child.ends)
                child.ids, child.edges, child.ends = child.ids[:common], {int(lower.ids[0]): lower}, None
            node, depth = child, depth + common


def _common(edge: _Ids, full: _Ids, start: int) -> int:
    """How many ids of ``edge`` equal those of ``full`` from ``start``."""
    length = min(len(edge), len(full) - start)
    differs: NDArray[Any] = edge[:length] != full[start : start + length]
    return int(differs.argmax()) if differs.any() else length
