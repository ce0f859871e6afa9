"""What a run proved, from its journal: each pair, each move of the stage, a picture and the sentences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.reports.plot import COLOURS, INK, line, picture
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import ServingStage
from swarm.evidence.verdict import PairedEvidence
from swarm.intervals import Interval
from swarm.server.journal.schema import reading


@dataclass(frozen=True)
class Story:
    """What happened to one challenger.

    Attributes:
        pairs: in their order; those that nobody judged are left out.
        proven: after each of them, the difference and its interval in its comparison.
        moves: the stages in which the share changed.
    """

    pairs: list[Pair]
    proven: list[Interval]
    moves: list[ServingStage]

    @property
    def sentences(self) -> list[str]:
        """Each move with its reason."""
        moves = zip(self.moves, self.moves[1:], strict=False)
        return [f"{before.label} -> {after.label}, by {after.by}: {after.why}" for before, after in moves]


def told(journal: Path) -> Story:
    """The story in a journal."""
    with reading(journal) as connection:
        rows = connection.execute("SELECT pair FROM pairs ORDER BY rowid").fetchall()
        stages = connection.execute("SELECT stage FROM stages ORDER BY rowid").fetchall()
    moves: list[ServingStage] = []
    for (row,) in stages:
        stage = ServingStage.model_validate_json(row)
        if not moves or moves[-1].share != stage.share:
            moves.append(stage)
    pairs = [pair for (row,) in rows if (pair := Pair.model_validate_json(row)).difference is not None]
    comparisons: dict[str, PairedEvidence] = {}
    proven: list[Interval] = []
    for pair in pairs:
        comparison = comparisons.setdefault(pair.terms.digest, PairedEvidence(pair.terms))
        comparison.add(pair)
        verdict = comparison.verdict()
        proven.append(Interval(verdict.difference, verdict.low, verdict.high))
    return Story(pairs, proven, moves)


def draw(story: Story, path: Path) -> None:
    """Write the PNG of ``story``: rewards of both sides by request, what is proven, and the stages."""
    places = range(1, len(story.pairs) + 1)
    with picture(path, (9, 7)) as figure:
        rewards, evidence, stages = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.2])
        for label, colour, values in (
            ("challenger (mean of its answers)", COLOURS[0], [pair.challenger.reward for pair in story.pairs]),
            ("incumbent", COLOURS[1], [pair.incumbent.reward for pair in story.pairs]),
        ):
            points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
            line(rewards, label, points, colour)
        rewards.set_title("Reward of both sides, by the gate's hook")
        rewards.set_ylim(0, 1)
        rewards.legend()
        evidence.fill_between(
            places,
            [one.low for one in story.proven],
            [one.high for one in story.proven],
            color=COLOURS[0],
            alpha=0.2,
            step="mid",
        )
        evidence.step(places, [one.mean for one in story.proven], where="mid", color=COLOURS[0])
        evidence.axhline(0, color=INK, linewidth=1)
        evidence.set_title("Difference in each comparison, 95 % interval at any time")
        evidence.set_ylim(-1, 1)
        stages.step(places, [pair.terms.share for pair in story.pairs], where="mid", color=COLOURS[2], linewidth=2)
        stages.set_title("Share of the conversations that the challenger answers")
        stages.set_ylim(-0.05, 1.05)
        stages.set_xlabel("compared request")
