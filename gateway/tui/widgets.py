"""The widgets of the monitor: tables, panels, the board that holds them, and the help.

Invariant: the scroll position of a table survives new rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.style import Style
from textual.widget import Widget
from textual.widgets import DataTable, Static

from gateway.views.format import BAD, DIM, WARNING, Line, Table, short
from gateway.views.swarm_view import STATES

#: Size of the terminal from which panels stand side by side.
WIDE, HIGH = 120, 30
#: Styles in cells of a DataTable, which are rich's.
_CELL_STYLES = {"": "", DIM: "dim", WARNING: "bold yellow", BAD: "bold red"}
#: The greatest width of a cell of a table.
_CELL = 100


def content(lines: Iterable[Line]) -> Content:
    """``lines`` as one text."""
    return Content("\n").join(
        Content.assemble((f"{line.label:<6} " if line.label else "", line.label_style), (line.text, line.style))
        for line in lines
    )


def names_line(names: Iterable[tuple[str, bool, str]]) -> Content:
    """Names side by side: each with whether it is chosen, and the action of a click on it."""
    return Content("").join(
        Content.styled(f" {name} ", Style(reverse=chosen, bold=chosen) + Style.from_meta({"@click": action}))
        for name, chosen, action in names
    )


class TableView(DataTable[Text]):
    """Shows a :class:`Table`; arrows and page keys scroll it."""

    DEFAULT_CSS = "Grid { background: transparent; height: 1fr; scrollbar-size: 1 1; }"

    def __init__(self) -> None:
        super().__init__(cursor_type="none")
        self._shown: Table | None = None

    def show(self, table: Table) -> None:
        """Show ``table`` instead of the one before."""
        if table == self._shown:
            return
        self._shown = table
        x, y = self.scroll_offset
        self.clear(columns=True)
        sides: list[JustifyMethod] = ["right" if title.startswith(">") else "left" for title in table.columns]
        titles = [title.removeprefix(">") for title in table.columns]
        rows = [[short(cell, _CELL) for cell in row.cells] for row in table.rows]
        for title, side, cells in zip(titles, sides, zip(titles, *rows, strict=True), strict=True):
            # textual measures columns later, and at times not at all once rows were replaced
            self.add_column(Text(title, justify=side), width=max(1, *map(cell_len, cells)))
        for row, cells in zip(table.rows, rows, strict=True):
            style = _CELL_STYLES[row.style]
            self.add_row(*(Text(cell, style, justify=side) for cell, side in zip(cells, sides, strict=True)))
        self.scroll_to(x, y, animate=False)


class Panel(Vertical):
    """A box with a title; ``body`` scrolls and takes the focus; a ``long`` one takes the whole width of the board.

    ``key`` brings it to the front.
    """

    DEFAULT_CSS = """
    Panel { border: round $surface-lighten-2; }
    Panel > VerticalScroll { padding: 0 1; scrollbar-size: 1 1; }
    Panel > VerticalScroll > Grid { height: auto; }
    Panel:focus-within { border: round $accent; }
    """

    def __init__(self, key: str, title: str, body: Widget, *, long: bool = False) -> None:
        super().__init__(classes="-long" if long else "")
        self.key = key
        self.title = title
        self.body = body
        self.border_title = Content(f"{title} ({key})")

    def compose(self) -> ComposeResult:
        yield self.body


class TablePanel(Panel):
    """The tables ``names`` below each other, which scroll together; the last one's note is in the lower border."""

    def __init__(self, key: str, title: str, *names: str, long: bool = False) -> None:
        self._grids = {name: TableView() for name in names or (key,)}
        grids = list(self._grids.values())
        super().__init__(key, title, VerticalScroll(*grids) if names else grids[0], long=long)

    def show(self, tables: Mapping[str, Table]) -> None:
        """Show its own of ``tables``."""
        for name, grid in self._grids.items():
            grid.show(tables[name])
            self.border_subtitle = Content(tables[name].note)


class LogPanel(Panel):
    """The log: lines of text that wrap."""

    def __init__(self, *, long: bool = False) -> None:
        self._text = Static(markup=False)
        super().__init__("l", "Log", VerticalScroll(self._text), long=long)

    def show(self, lines: Iterable[Line]) -> None:
        """Show ``lines``."""
        self._text.update(content(lines))


class Board(Vertical):
    """Panels under a line with their names: side by side where there is room, else one at a time."""

    DEFAULT_CSS = """
    Board { height: 1fr; }
    Board > .names { height: 1; width: 1fr; text-wrap: nowrap; }
    Board > Container { height: 1fr; layout: vertical; }
    Board > Container > Panel { display: none; height: 1fr; }
    Board > Container > Panel.-chosen { display: block; }
    Board.-wide > Container { layout: grid; grid-size: 2; }
    Board.-wide > Container > Panel { display: block; }
    Board.-wide > Container > Panel.-long { column-span: 2; }
    """

    def __init__(self, panels: Sequence[Panel]) -> None:
        super().__init__()
        self.panels = list(panels)
        self.chosen = self.panels[0]
        self._names = Static(markup=False, classes="names")

    def compose(self) -> ComposeResult:
        yield self._names
        yield Container(*self.panels)

    def on_mount(self) -> None:
        self._mark()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= WIDE and event.size.height >= HIGH, "-wide")

    def choose(self, key: str) -> None:
        """Bring the panel of ``key`` to the front, if there is one."""
        for panel in self.panels:
            if panel.key == key:
                self.chosen = panel
                self._mark()
                panel.body.focus()

    def turn(self, by: int) -> None:
        """Bring the next panel to the front, or the one before (``by`` = -1)."""
        self.choose(self.panels[(self.panels.index(self.chosen) + by) % len(self.panels)].key)

    def _mark(self) -> None:
        for panel in self.panels:
            panel.set_class(panel is self.chosen, "-chosen")
        self._names.update(
            names_line(
                (f"{panel.key} {panel.title}", panel is self.chosen, f"app.choose('{panel.key}')")
                for panel in self.panels
            )
        )


HELP = """\
The monitor only looks: no key changes anything on a server.

 q, ctrl+c   leave                      tab         the next panel (shift: before)
 ? or h      this help                  arrows      scroll the panel
 1 to 9      a page by its number       a letter    the panel with it in its title
 [ and ]     the page before, the next

States of an engine
{states}

 policy version     the training step whose weights serve now
 batch              what the next step still needs
 idle               an episode's time without an LLM call; `!` from half of its
                    timeout (`of`) on, at whose end the server takes it back
 reward, ±          mean of the answers' rewards, and their standard deviation: over
                    the whole step at a server, within a group at a gateway
 groups differ      those whose answers got different rewards or a credit: only
                    those teach
 not delivered      tokens of answers that nobody got: of N answers a user gets
                    the best, the others are the price of choosing and learning
 history lost       calls that do not repeat the tokens of the answer before
 breaker            of a route's upstream: open while it fails

A line that begins with `!` says what is wrong and what to do. The monitor asks a server
that does not answer again after ten seconds at the latest. `as of`: age of the data.
"""


class HelpScreen(ModalScreen[None]):
    """The help, until any of its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark,h,enter", "dismiss", "Close")]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 90; max-width: 100%; height: auto; max-height: 100%;
        border: round $accent; padding: 0 1; background: $surface; scrollbar-size-vertical: 1;
    }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Help (Escape closes)"
            states = (f" {sign} {state.removeprefix('ENGINE.'):<15}{text}" for state, (sign, _, text) in STATES.items())
            yield Static(HELP.replace("{states}", "\n".join(states)), markup=False)
