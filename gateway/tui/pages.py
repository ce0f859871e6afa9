"""The pages of the monitor: all servers, and one of them.

Invariant: a page shows the data of its poller, and sends no request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from gateway.tui.poller import GatewayPoller, SwarmPoller
from gateway.tui.widgets import Board, LogPanel, TablePanel, TableView, content
from gateway.views.format import BAD, DIM, UNKNOWN, WARNING, Columns, Line, printable, seconds, short, table_of
from swarm.states import EngineState
from swarm.status import LogEntry

AnyPoller = SwarmPoller | GatewayPoller

#: Rows of the terminal below which the head leaves out minor lines.
_BRIEF = 34
#: Seconds from which on the age of a status is a warning.
_OLD = 5.0
_OVERVIEW: Columns[tuple[int, AnyPoller]] = {
    ">tab": lambda row: str(row[0]),
    "server": lambda row: row[1].target.name,
    "state": lambda row: f"! {row[1].trouble.reason}" if row[1].trouble else _cell(row[1], "state"),
    "reward": lambda row: _cell(row[1], "reward"),
    "batch": lambda row: _cell(row[1], "batch"),
    "now": lambda row: _cell(row[1], "now"),
    ">version": lambda row: _cell(row[1], "version"),
    ">as of": lambda row: UNKNOWN if row[1].age is None else f"{seconds(row[1].age)} ago",
}


def _cell(poller: AnyPoller, name: str) -> str:
    return UNKNOWN if poller.view is None else getattr(poller.view, name)


class Page(Vertical):
    """One server: a head above a board of panels."""

    DEFAULT_CSS = """
    Page { height: 1fr; }
    Page > .head { height: auto; max-height: 60%; padding: 0 1; }
    """

    def __init__(self, poller: AnyPoller) -> None:
        super().__init__()
        self.poller = poller
        if isinstance(poller, SwarmPoller):
            titles = {"e": "Episodes", "t": "Tasks", "c": "Clients", "d": "Dropped"}
            steps = TablePanel("s", "Steps", "curves", "steps")
            self._tables = [steps, *(TablePanel(*panel) for panel in titles.items())]
        else:
            routes = TablePanel("g", "Routes", long=True)
            self._tables = [routes, TablePanel("w", "Swarm servers"), TablePanel("f", "Failures")]
        # beside three tables it has a row of its own
        self._log = LogPanel(long=isinstance(poller, GatewayPoller))
        self.board = Board([*self._tables, self._log])
        self._head = Static(markup=False, classes="head")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.board

    @property
    def focused(self) -> Widget:
        """The widget that takes the keys."""
        return self.board.chosen.body

    def show(self) -> None:
        """Show the last known data."""
        self.show_head()
        view = self.poller.view
        self._log.show(_log(self.poller.log.lines, () if view is None else view.last_lines))
        if view is not None:
            for panel in self._tables:
                panel.show(view.tables)

    def show_head(self) -> None:
        """Show the head alone, whose times go on between two requests."""
        poller, trouble = self.poller, _trouble(self.poller)
        if poller.view is None or poller.age is None:
            self._head.update(content(trouble or [Line(f"asking {poller.target.address} ...", DIM)]))
            return
        first, *rest = poller.view.head
        brief, width = self.app.size.height < _BRIEF, self._head.content_size.width
        age = Content.styled(f"  as of {seconds(poller.age)} ago", WARNING if poller.age > _OLD else DIM)
        head = [content([first]) + age, *(content([line]) for line in rest if not (brief and line.minor))]
        if brief and width:
            # each line has one row where there is little room
            head = [line.truncate(width, ellipsis=True) for line in head]
        self._head.update(Content("\n").join([*([content(trouble)] if trouble else []), *head]))


class OverviewPage(VerticalScroll):
    """All servers: a row for each, and below what stands in the way of any."""

    DEFAULT_CSS = "OverviewPage { padding: 0 1; } OverviewPage > Grid { height: auto; }"

    def __init__(self, pollers: Sequence[AnyPoller]) -> None:
        super().__init__()
        self._pollers = pollers
        self._grid = TableView()
        self._troubles = Static(markup=False)
        self.focused = self

    def compose(self) -> ComposeResult:
        yield self._grid
        yield self._troubles

    def show(self) -> None:
        """Show the last known data."""
        self._grid.show(
            table_of(
                _OVERVIEW,
                enumerate(self._pollers, 2),
                lambda row: BAD if row[1].trouble else "" if row[1].view else DIM,
            )
        )
        lines: list[Line] = []
        for poller in self._pollers:
            lines += _trouble(poller)
            if poller.trouble is None and isinstance(poller, SwarmPoller) and poller.status is not None:
                engine = poller.status.engine
                if engine.engine_status is EngineState.OFFLINE:
                    why = printable(engine.engine_status_detail)
                    lines.append(Line(f"! {poller.target.name} is OFFLINE: {why}", WARNING))
            if poller.trouble is None and poller.view is not None:
                # what stands in the way on a page is seen from here
                lines += [
                    Line(f"! {poller.target.name}, {line.label}: {line.text[2:]}", line.style)
                    for line in poller.view.head
                    if line.text.startswith("! ")
                ]
        self._troubles.update(content(lines))

    show_head = show


def answering(pollers: Sequence[AnyPoller]) -> str:
    """``2 of 3 servers answer``, or ``the gateway answers`` for one server alone."""
    well = sum(poller.trouble is None and poller.status is not None for poller in pollers)
    if len(pollers) == 1:
        return f"the {pollers[0].target.kind} {'answers' if well else 'does not answer'}"
    return f"{well} of {len(pollers)} servers answer"


def _trouble(poller: AnyPoller) -> list[Line]:
    """Why there is no status, what to do, and when the next request comes; nothing while all is well."""
    trouble = poller.trouble
    if trouble is None:
        return []
    again = f"asked again in {seconds(poller.next_try)}" if poller.next_try > 0 else "being asked again"
    old = f"; the data below is {seconds(poller.age)} old" if poller.age is not None else ""
    return [Line(f"! {trouble.reason.value.upper()}: {printable(trouble.message)}; {again}{old}", BAD)]


def _log(lines: Sequence[LogEntry], last_lines: Iterable[str]) -> list[Line]:
    """The log, the last line first, below a dead engine's last lines."""
    made = [Line(f"| {printable(line)}") for line in last_lines]
    if made:
        made.insert(0, Line("the engine's last lines", WARNING))
    for line in reversed(lines):
        tag = f"[{short(line.tag, 20)}] " if line.tag else ""
        made.append(Line(tag + printable(line.message), label=_clock(line.timestamp)))
    return made or [Line("nothing has happened yet", DIM)]


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        # the sender of a pushed line chooses its time
        return "--:--:--"
