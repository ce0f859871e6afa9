"""Merge the calls of one episode into timelines, comparing token ids only.

Invariant: every sampled token of every call is in exactly one timeline with mask 1, unless another call sampled the
same tokens after the same prompt, or the answer went astray and its caller asked again; nothing is ever joined that is
not an exact prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    calls = [call for call in _delivered(calls) if len(call.response_ids)]
    if len(calls) == 1:
        # the most frequent kind of episode
        return [_Growing(calls).timeline()]
    root = _Node(np.empty(0, np.int32))
    growing: dict[int, _Growing] = {}
    # Short prompts first: parallel calls finish in any order, yet a call must be seen before those that continue it.
    # Of calls with one prompt the longest answer goes first, so that an answer that is its prefix is absorbed.
    order = sorted(range(len(calls)), key=lambda i: (len(calls[i].prompt_ids), -len(calls[i].response_ids)))
    for index in order:
        call = calls[index]
        full = np.concatenate([call.prompt_ids, call.response_ids])
        holder, extends = root.find(full, len(call.prompt_ids))
        if holder is not None:
            # all prompts in that timeline are at most as long as this one: its tokens past our prompt are sampled
            holder.absorbed += 1
            continue
        if extends is None:
            extends = growing[index] = _Growing([])
        extends.calls.append(call)
        root.insert(full, extends)
    return [growing[index].timeline() for index in sorted(growing)]


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


@dataclass
class _Growing:
    """A timeline in the making: its calls, each of which goes on from all tokens of the one before."""

    calls: list[ModelCall]
    absorbed: int = 0

    def timeline(self) -> Timeline:
        first, last = self.calls[0], self.calls[-1]
        # those of a single call are shared with it
        ids, values, mask = first.response_ids, first.logprobs, np.ones(len(first.response_ids), np.bool_)
        versions = first.versions
        if last is not first:
            begin = len(first.prompt_ids)
            ids = np.concatenate([last.prompt_ids[begin:], last.response_ids])
            values, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.bool_)
            runs: list[tuple[int, int]] = []
            for call in self.calls:
                at = len(call.prompt_ids) - begin
                sampled = slice(at, at + len(call.response_ids))
                values[sampled], mask[sampled] = call.logprobs, True
                runs += [(at + run, version) for run, version in call.versions or [(0, call.min_policy_version)]]
            runs = join_runs(runs)
            versions = runs if len(runs) > 1 else []
        return Timeline(
            prompt_ids=first.prompt_ids,
            response_ids=ids,
            response_mask=mask,
            logprobs=values,
            min_policy_version=min(call.min_policy_version for call in self.calls),
            max_policy_version=max(call.max_policy_version for call in self.calls),
            versions=versions,
            num_calls=len(self.calls) + self.absorbed,
        )


@dataclass(slots=True)
class _Node:
    """A node of a radix tree over all tokens of all timelines: ``ids`` are on the edge that leads here; ``ends`` is the
    timeline that ends here. Every leaf ends one."""

    ids: _Ids
    edges: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    ends: _Growing | None = None

    def find(self, full: _Ids, prompt_length: int) -> tuple[_Growing | None, _Growing | None]:
        """A timeline that begins with all of ``full``; and the longest one with all of which its prompt begins."""
        node, depth, extends = self, 0, None
        while depth < len(full):
            child = node.edges.get(int(full[depth]))
            if child is None:
                return None, extends
            common = _common(child.ids, full, depth)
            depth += common
            node = child
            if common < len(child.ids):
                break
            if child.ends is not None and depth <= prompt_length:
                extends = child.ends
        if depth < len(full):
            return None, extends
        while node.ends is None:
            node = next(iter(node.edges.values()))
        return node.ends, extends

    def insert(self, full: _Ids, timeline: _Growing) -> None:
        """Add ``full``, which is not yet contained, as the ids of ``timeline``; its shorter end is forgotten."""
        node, depth = self, 0
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
    differs: NDArray[np.bool_] = edge[:length] != full[start : start + length]
    return int(differs.argmax()) if differs.any() else length
