"""Panels and the board that holds them: side by side where there is room, else one at a time.

Invariant: a panel's text is made for the width that it has now, and where it is scrolled to survives new text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.style import Style
from textual.widgets import Static

#: The text of a panel for so many cells of width.
Build = Callable[[int], Sequence[Content]]

#: Cells from which panels stand side by side.
WIDE, HIGH = 120, 30


def names_line(names: Iterable[tuple[str, bool, str]]) -> Content:
    """Names side by side: each with whether it is chosen, and the action of a click on it."""
    return Content("").join(
        Content.styled(f" {name} ", Style(reverse=chosen, bold=chosen) + Style.from_meta({"@click": action}))
        for name, chosen, action in names
    )


class Panel(VerticalScroll):
    """A box with a title whose text scrolls.

    Args:
        key: that brings it to the front.
        title: of the box.
        long: it takes the whole width of the board.
    """

    DEFAULT_CSS = """
    Panel {
        border: round $surface-lighten-2;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
    }
    Panel:focus { border: round $accent; }
    Panel > Static { width: 1fr; height: auto; }
    """

    def __init__(self, key: str, title: str, *, long: bool = False) -> None:
        super().__init__(classes="-long" if long else "")
        self.key = key
        self.title = title
        self.border_title = Content(f"{title} ({key})")
        self._text = Static(markup=False)
        self._build: Build = lambda width: ()

    def compose(self) -> ComposeResult:
        yield self._text

    def show(self, build: Build) -> None:
        """Show what ``build`` makes, now and at every other width."""
        self._build = build
        self.redraw()

    def redraw(self) -> None:
        """Make the text anew; a panel that nobody sees waits until somebody does."""
        if (width := self.scrollable_content_region.width) > 0:
            self._text.update(Content("\n").join(self._build(width)))

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()


class Board(Vertical):
    """Panels under a line with their names; ``panels`` in the order of the line, the first is chosen at first."""

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
        self._names = Static(markup=False, classes="names")
        self._chosen = self.panels[0]

    def compose(self) -> ComposeResult:
        yield self._names
        yield Container(*self.panels)

    def on_mount(self) -> None:
        self._mark()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= WIDE and event.size.height >= HIGH, "-wide")

    @property
    def chosen(self) -> Panel:
        """The panel in front."""
        return self._chosen

    def choose(self, key: str) -> bool:
        """Bring the panel of ``key`` to the front; false where there is none."""
        for panel in self.panels:
            if panel.key == key:
                self._chosen = panel
                self._mark()
                panel.focus()
                return True
        return False

    def turn(self, by: int) -> None:
        """Bring the next panel to the front, or the one before (``by`` = -1)."""
        self.choose(self.panels[(self.panels.index(self._chosen) + by) % len(self.panels)].key)

    def _mark(self) -> None:
        for panel in self.panels:
            panel.set_class(panel is self._chosen, "-chosen")
        self._names.update(
            names_line(
                (f"{panel.key} {panel.title}", panel is self._chosen, f"app.choose('{panel.key}')")
                for panel in self.panels
            )
        )
        # one that comes to the front has no size before the next layout, and may keep the one it had
        self.call_after_refresh(self._chosen.redraw)
