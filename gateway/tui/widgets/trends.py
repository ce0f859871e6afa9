"""The panel of steps: metrics as sparklines with their last, lowest and highest values, and the steps as a table.

Invariant: a sparkline shows what was reported and nothing in between; a metric that nobody reports has no line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Sparkline, Static

from gateway.cli.status import RESPONSE_TOKENS, REWARD
from gateway.tui import swarm_tables
from gateway.tui.widgets.panel import Panel
from gateway.tui.words import measure
from swarm.types import StepResult

#: Name on the screen -> the metric of a step.
METRICS: Mapping[str, Callable[[StepResult], float | None]] = {
    "reward": lambda step: step.metrics.get(REWARD),
    "reward spread": lambda step: step.metrics.get("swarm/reward_std"),
    "tokens/answer": lambda step: step.metrics.get(RESPONSE_TOKENS),
    "seconds/step": lambda step: step.seconds,
    "entropy": lambda step: step.metrics.get("actor/entropy"),
    "gradient norm": lambda step: step.metrics.get("actor/grad_norm"),
    "KL loss": lambda step: step.metrics.get("actor/kl_loss"),
}
#: Rates that were seen here, by name.
EPISODES, TOKENS = "episodes/min", "tokens/s"
#: From here on sums of values and differences between them may be no float any more.
_MOST = 1e300


class Trend(Horizontal):
    """One line: a name, its last value, its curve, and between which values that runs."""

    DEFAULT_CSS = """
    Trend { height: 1; width: 1fr; }
    Trend > .name { width: 24; text-wrap: nowrap; }
    Trend > Sparkline { width: 1fr; height: 1; margin: 0 1; }
    Trend > .range { width: 18; text-wrap: nowrap; color: $text-muted; }
    Trend > Sparkline > .sparkline--max-color { color: $text; }
    Trend > Sparkline > .sparkline--min-color { color: $text; }
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._name = Static(markup=False, classes="name")
        self._line = Sparkline([], summary_function=fmean)
        self._range = Static(markup=False, classes="range")
        self.display = False

    def compose(self) -> ComposeResult:
        yield self._name
        yield self._line
        yield self._range

    def show(self, values: Sequence[float]) -> None:
        """Oldest first; what is no number is left out, and what no mean can be taken of."""
        values = [value for value in values if abs(value) < _MOST]
        self.display = bool(values)
        if not values:
            return
        self._name.update(f"{self._title:<14} {measure(values[-1]):>8}")
        # of a single value, and of equal ones, there is no curve: textual's would be a full block, or none
        self._line.data = values if len(values) > 1 else []
        self._range.update(f"{measure(min(values))} … {measure(max(values))}")


class StepsPanel(Panel):
    """Trends above the table of steps."""

    def __init__(self) -> None:
        super().__init__("s", "Steps")
        self._trends = {name: Trend(name) for name in [*METRICS, EPISODES, TOKENS]}

    def compose(self) -> ComposeResult:
        yield from self._trends.values()
        yield from super().compose()

    def show_steps(self, history: Sequence[StepResult], rates: Mapping[str, Sequence[float]]) -> None:
        """The steps, oldest first, and what was seen of rates."""
        for name, of in METRICS.items():
            found = (of(step) for step in history)
            self._trends[name].show([value for value in found if value is not None])
        for name, values in rates.items():
            self._trends[name].show(values if any(values) else [])
        self.show(lambda width: swarm_tables.steps(history, width))
