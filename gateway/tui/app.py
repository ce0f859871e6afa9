"""``MonitorApp``: the terminal; it runs the followers, shows their news and turns keys into what is shown.

Invariant: nothing that a server does ends it, leaving it ends every question under way, and no secret is ever shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.traceback import Traceback
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import ContentSwitcher, Footer, Static

from gateway.tui.following import SwarmFollower, follow
from gateway.tui.overview import answering
from gateway.tui.targets import Target
from gateway.tui.widgets.help import HelpScreen
from gateway.tui.widgets.pages import GatewayPage, OverviewPage, Page, SwarmPage
from gateway.tui.widgets.panel import names_line
from gateway.tui.words import seconds

#: Seconds after which the times on the screen are told anew.
_TICK = 0.5


class MonitorApp(App[None]):
    """The monitor of ``targets``, asked every ``interval`` seconds."""

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
        Binding("p", "pause", "Pause"),
        Binding("r", "hurry", "Ask now"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("o", "order", "Order"),
        Binding("escape", "clear", "All episodes", show=False),
        Binding("left_square_bracket", "page(-1)", "Page before", show=False),
        Binding("right_square_bracket", "page(1)", "Next page", show=False),
        Binding("tab", "panel(1)", "Panels", key_display="tab", priority=True),
        Binding("shift+tab", "panel(-1)", "Panel before", show=False, priority=True),
        *(Binding(key, f"choose('{key}')", show=False) for key in "setcdlgwf"),
        *(Binding(str(number), f"number({number})", show=False) for number in range(1, 10)),
    ]

    def __init__(self, targets: Sequence[Target], interval: float = 1.0) -> None:
        super().__init__()
        self.followers = [follow(target, interval, self._news) for target in targets]
        self._paused_at: float | None = None
        self._switcher = ContentSwitcher(initial="page-0")
        self._top = Static(id="top", markup=False)
        self._overview = OverviewPage(self.followers)
        self.pages: list[Page] = [
            SwarmPage(one) if isinstance(one, SwarmFollower) else GatewayPage(one) for one in self.followers
        ]
        self._names = Static(id="names", markup=False)
        self._place = 0 if len(targets) > 1 else 1

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._names
        with self._switcher:
            for place, page in enumerate([self._overview, *self.pages]):
                page.id = f"page-{place}"
                yield page
        yield Footer()

    def on_mount(self) -> None:
        for follower in self.followers:
            self.run_worker(follower.run(), name=f"following {follower.target.name}")
        self.set_interval(_TICK, self._tick)
        self._turn_to(self._place)

    def _fatal_error(self) -> None:
        # textual's own shows the locals of every frame, and secrets are among those
        self.panic(Traceback(show_locals=False))

    # ------------------------------------------------------------------ what is shown

    @property
    def page(self) -> Page | None:
        """The page in front; ``None`` for that of all servers."""
        return self.pages[self._place - 1] if self._place else None

    def _news(self) -> None:
        if self._paused_at is None and self.is_running:
            self._show()

    def _show(self) -> None:
        page = self.page
        (self._overview if page is None else page).show()
        self._show_top()

    def _tick(self) -> None:
        self._show_top()
        if self._paused_at is not None:
            return
        if (page := self.page) is not None:
            page.show_head()
        else:
            self._overview.show()

    def _show_top(self) -> None:
        words = f"{self.TITLE} · {answering(self.followers)} · {time.strftime('%H:%M:%S')}  "
        paused = ""
        if self._paused_at is not None:
            paused = f" PAUSED for {seconds(time.monotonic() - self._paused_at)}: p goes on "
        self._top.update(Content.assemble(words, (paused, "bold reverse")))

    def _turn_to(self, place: int) -> None:
        self._place = place
        self._switcher.current = f"page-{place}"
        names = ["all", *(follower.target.name for follower in self.followers)]
        self._names.update(
            names_line(
                (f"{number} {name}", number == place + 1, f"app.number({number})")
                for number, name in enumerate(names, 1)
            )
        )
        # a page that comes to the front has its size only after the next layout
        self.call_after_refresh(self._arrive)

    def _arrive(self) -> None:
        page = self.page
        # a focus that stayed on a page behind would bring that one back
        (self._overview if page is None else page.board.chosen).focus()
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    # ------------------------------------------------------------------ keys

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())

    def action_pause(self) -> None:
        """Keep what is shown as it is, or go on."""
        self._paused_at = time.monotonic() if self._paused_at is None else None
        self._show_top() if self._paused_at is not None else self._show()

    def action_hurry(self) -> None:
        """Ask all servers now."""
        for follower in self.followers:
            follower.hurry()

    def action_filter(self) -> None:
        """Choose episodes by words."""
        if isinstance(page := self.page, SwarmPage):
            page.ask_filter()

    def action_order(self) -> None:
        """Sort episodes by something else."""
        if isinstance(page := self.page, SwarmPage):
            page.next_order()

    def action_clear(self) -> None:
        """Show all episodes."""
        if isinstance(page := self.page, SwarmPage):
            page.clear_filter()

    def action_page(self, by: int) -> None:
        """The next page, or the one before."""
        self._turn_to((self._place + by) % (len(self.pages) + 1))

    def action_number(self, number: int) -> None:
        """The page of that number."""
        if number <= len(self.pages) + 1:
            self._turn_to(number - 1)

    def action_panel(self, by: int) -> None:
        """The next panel, or the one before."""
        if (page := self.page) is not None:
            page.board.turn(by)

    def action_choose(self, key: str) -> None:
        """The panel of that key."""
        if (page := self.page) is not None:
            page.board.choose(key)
