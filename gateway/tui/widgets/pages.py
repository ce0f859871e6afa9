"""The pages of a swarm server and of a gateway: a head, and the board with the panels.

Invariant: a page shows what its follower knows and asks nobody anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Static

from gateway.tui import gateway_text, overview, swarm_tables, swarm_text
from gateway.tui.following import GatewayFollower, SwarmFollower
from gateway.tui.swarm_tables import Order
from gateway.tui.widgets.panel import Board, Panel
from gateway.tui.widgets.trends import EPISODES, TOKENS, StepsPanel

#: Rows of the terminal below which the head tells only what is not as it should be.
_BRIEF = 34


class Page(Vertical):
    """A head above a board.

    Args:
        follower: what is shown.
        panels: of the board.
    """

    DEFAULT_CSS = """
    Page { height: 1fr; }
    Page > .head { height: auto; max-height: 60%; padding: 0 1; }
    """

    def __init__(self, follower: SwarmFollower | GatewayFollower, panels: Sequence[Panel]) -> None:
        super().__init__()
        self.follower = follower
        self.board = Board(panels)
        self._head = Static(markup=False, classes="head")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.board

    @property
    def brief(self) -> bool:
        """Whether there is little room."""
        return self.app.size.height < _BRIEF

    def show(self) -> None:
        """What is known now."""
        self.show_head()
        self.show_panels()

    def show_head(self) -> None:
        """The head alone: its times go on without news."""
        follower = self.follower
        made = swarm_text.trouble_lines(follower.trouble, follower.next_try, follower.age)
        if follower.status is None and not made:
            made = [Content.styled(f"asking {follower.target.address} ...", swarm_text.DIM)]
        told = self.told(swarm_text.freshness(follower.age))
        width = self._head.content_size.width
        # where there is little room each line has one row
        made += [line.truncate(width, ellipsis=True) for line in told] if self.brief and width else told
        self._head.update(Content("\n").join(made))

    def told(self, fresh: tuple[str, str]) -> list[Content]:
        """The lines of the head that the server told."""
        raise NotImplementedError

    def show_panels(self) -> None:
        """The panels."""
        raise NotImplementedError


class SwarmPage(Page):
    """A swarm server."""

    def __init__(self, follower: SwarmFollower) -> None:
        self._steps = StepsPanel()
        self._episodes = Panel("e", "Episodes")
        self._tasks = Panel("t", "Tasks")
        self._clients = Panel("c", "Clients")
        self._losses = Panel("d", "Dropped")
        self._log = Panel("l", "Log")
        super().__init__(follower, [self._steps, self._episodes, self._tasks, self._clients, self._losses, self._log])
        self._swarm = follower
        self.filter = Input(placeholder="client, task, episode or type; Enter keeps, Escape clears", id="filter")
        self.filter.display = False
        self._order = Order.IDLE

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield self.filter

    def next_order(self) -> None:
        """Sort the episodes by something else, and show them."""
        self._order = self._order.next
        self.board.choose(self._episodes.key)
        self.show_panels()

    def ask_filter(self) -> None:
        """Let the user type what the episodes are chosen by."""
        self.board.choose(self._episodes.key)
        self.filter.display = True
        self.filter.focus()

    def clear_filter(self) -> None:
        """Show all episodes again."""
        self.filter.value = ""
        self.filter.display = False
        self.board.chosen.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.show_panels()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.filter.display = bool(self.filter.value)
        self.board.chosen.focus()

    def told(self, fresh: tuple[str, str]) -> list[Content]:
        status = self._swarm.status
        return [] if status is None else swarm_text.head_lines(status, fresh, self.brief)

    def show_panels(self) -> None:
        follower, order, wanted = self._swarm, self._order, self.filter.value
        chronicle, status = follower.chronicle.lines, follower.status
        last_lines = status.last_lines if status is not None else []
        self._log.show(lambda width: swarm_tables.happened(chronicle, last_lines, width))
        if status is None:
            return
        rates = {EPISODES: follower.episodes.points, TOKENS: follower.tokens.points}
        self._steps.show_steps(follower.history.steps, rates)
        self._episodes.show(lambda width: swarm_tables.episodes(status, order, wanted, width))
        self._tasks.show(lambda width: swarm_tables.tasks(status, width))
        self._clients.show(lambda width: swarm_tables.clients(status, width))
        self._losses.show(lambda width: swarm_tables.losses(status, width))


class GatewayPage(Page):
    """A gateway."""

    def __init__(self, follower: GatewayFollower) -> None:
        self._routes = Panel("g", "Routes", long=True)
        self._swarms = Panel("w", "Swarm servers")
        self._failures = Panel("f", "Failures")
        self._log = Panel("l", "Log", long=True)
        super().__init__(follower, [self._routes, self._swarms, self._failures, self._log])
        self._gateway = follower

    def told(self, fresh: tuple[str, str]) -> list[Content]:
        status = self._gateway.status
        if status is None:
            return []
        return gateway_text.head_lines(status, self._gateway.growth.per_second, fresh)

    def show_panels(self) -> None:
        chronicle, status = self._gateway.chronicle.lines, self._gateway.status
        self._log.show(lambda width: swarm_tables.happened(chronicle, (), width))
        if status is None:
            return
        self._routes.show(lambda width: gateway_text.routes(status, width))
        self._swarms.show(lambda width: gateway_text.swarms(status, width))
        self._failures.show(lambda width: gateway_text.failures(status, width))


class OverviewPage(VerticalScroll):
    """All servers."""

    DEFAULT_CSS = "OverviewPage { padding: 0 1; scrollbar-size-vertical: 1; }"

    def __init__(self, followers: Sequence[SwarmFollower | GatewayFollower]) -> None:
        super().__init__()
        self._followers = followers
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show(self) -> None:
        """What is known now."""
        if (width := self.scrollable_content_region.width) > 0:
            self._text.update(Content("\n").join(overview.overview(self._followers, width)))
