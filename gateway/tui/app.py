"""``MonitorApp``: runs the pollers, shows their data, and handles the keys.

Invariant: no answer of a server ends the monitor, leaving it ends every request, and it never shows a secret.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.traceback import Traceback
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import ContentSwitcher, Footer, Static

from gateway.tui.pages import OverviewPage, Page, answering
from gateway.tui.poller import GatewayPoller, SwarmPoller
from gateway.tui.targets import Kind, Target
from gateway.tui.widgets import HelpScreen, names_line

#: Seconds between two updates of the times on the screen.
_TICK = 0.5


class MonitorApp(App[None]):
    """The monitor of ``targets``; requests the status of each every ``interval`` seconds."""

    TITLE = "swarm-gateway monitor"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #top { height: 1; width: 1fr; padding: 0 1; background: $panel; text-wrap: nowrap; }
    #names { height: 1; width: 1fr; text-wrap: nowrap; }
    ContentSwitcher { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", "Quit", key_display="q", priority=False),
        Binding("question_mark,h", "help", "Help", key_display="?"),
        Binding("left_square_bracket", "page(-1)", "Page before", show=False),
        Binding("right_square_bracket", "page(1)", "Next page", show=False),
        Binding("tab", "panel(1)", "Panels", key_display="tab", priority=True),
        Binding("shift+tab", "panel(-1)", "Panel before", show=False, priority=True),
        *(Binding(key, f"choose('{key}')", show=False) for key in "setcdlgwfa"),
        *(Binding(str(number), f"number({number})", show=False) for number in range(1, 10)),
    ]

    def __init__(self, targets: Sequence[Target], interval: float = 1.0) -> None:
        super().__init__()
        kinds = {Kind.SWARM: SwarmPoller, Kind.GATEWAY: GatewayPoller}
        self.pollers = [kinds[target.kind](target, interval, self._on_change) for target in targets]
        self._pages = [OverviewPage(self.pollers), *map(Page, self.pollers)]
        self._number = 0 if len(targets) > 1 else 1
        self._top = Static(id="top", markup=False)
        self._names = Static(id="names", markup=False)
        self._switcher = ContentSwitcher(initial="page-0")

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._names
        with self._switcher:
            for number, page in enumerate(self._pages):
                page.id = f"page-{number}"
                yield page
        yield Footer()

    def on_mount(self) -> None:
        for poller in self.pollers:
            self.run_worker(poller.run(), name=f"polling {poller.target.name}")
        self.set_interval(_TICK, lambda: self._guarded(self._tick))
        self._turn_to(self._number)

    @property
    def _page(self) -> Page | OverviewPage:
        """In front."""
        return self._pages[self._number]

    def show(self) -> None:
        """Show the last known data."""
        self._page.show()
        self._show_top()

    def _on_change(self) -> None:
        if self.is_running:
            self._guarded(self.show)

    def _guarded(self, show: Callable[[], None]) -> None:
        """Leave on a defect; textual's own traceback would print local variables, secrets among them."""
        try:
            show()
        except Exception:
            self.exit(return_code=1, message=Traceback(show_locals=False))

    def _tick(self) -> None:
        self._show_top()
        self._page.show_head()

    def _show_top(self) -> None:
        self._top.update(Content(f"{self.TITLE} · {answering(self.pollers)} · {time.strftime('%H:%M:%S')}"))

    def _turn_to(self, page: int) -> None:
        self._number = page
        self._switcher.current = f"page-{page}"
        names = ["all", *(poller.target.name for poller in self.pollers)]
        self._names.update(
            names_line(
                (f"{number} {name}", number == page + 1, f"app.number({number})")
                for number, name in enumerate(names, 1)
            )
        )
        # a page that comes to the front has its size only after the next layout
        self.call_after_refresh(self._arrive)

    def _arrive(self) -> None:
        # a focus that stayed on a page behind would bring that one back
        self._page.focused.focus()
        self._guarded(self.show)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(lambda: self._guarded(self.show))

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_page(self, by: int) -> None:
        self._turn_to((self._number + by) % len(self._pages))

    def action_number(self, number: int) -> None:
        if number <= len(self._pages):
            self._turn_to(number - 1)

    def action_panel(self, by: int) -> None:
        if isinstance(page := self._page, Page):
            page.board.turn(by)

    def action_choose(self, key: str) -> None:
        if isinstance(page := self._page, Page):
            page.board.choose(key)
