"""The status of a swarm server as lines of text: a short form of the monitor's page."""

from __future__ import annotations

from gateway.tui.format import printable, step_line, text_lines
from gateway.tui.swarm_view import Order, episodes, view
from swarm.status import ServerStatus

#: Rows of each kind that are shown.
ROWS = 5


def status_lines(status: ServerStatus, steps: int = ROWS) -> list[str]:
    """The engine, its pool, who runs what, what went wrong, the last ``steps`` steps and a dead engine's last lines.

    Parts without content are left out.
    """
    shown = view(status, ())
    lines = [f"{line.label:<6} {line.text}" for line in shown.head]
    for table in (shown.tables["c"], episodes(status, Order.IDLE, ""), shown.tables["d"]):
        if table.rows:
            lines += ["", *text_lines(table, ROWS)]
    if status.log or status.steps:
        lines += ["", *(f"{entry.tag or 'log'}: {entry.message}" for entry in status.log[-ROWS:])]
        lines += [step_line(step) for step in status.steps[-steps:]]
    lines += [f"  | {line}" for line in status.last_lines]
    return [printable(line) for line in lines]
