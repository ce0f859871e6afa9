"""The help: every key, and what each part of the pages means.

Invariant: it fits a terminal of 80 columns; what is longer than the terminal scrolls.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

HELP = """\
The monitor only looks: no key changes anything on a server.

 q, ctrl+c   leave                      1 to 9      a page by its number
 ? or h      this help                  [ and ]     the page before, the next
 p           pause: what is shown       tab,        the next panel,
             stays, asking goes on      shift+tab   the one before
 r           ask again now              arrows,     scroll the panel
 /           choose episodes by words   page keys
 escape      show all episodes again    o           sort episodes by something else

 Panels of a swarm server               Panels of a gateway
 s  Steps      e  Episodes              g  Routes     w  Swarm servers
 t  Tasks      c  Clients               f  Failures   l  Log
 d  Dropped    l  Log

States of an engine
 ○ OFFLINE          nothing is claimed or trained; `why` says why
 ◔ BOOTING          claims wait until it rolls
 ● ROLLING          episodes are claimed and run
 ◕ ROLLING_POST     the batch is complete; what runs may finish
 ◆ WEIGHT_SYNCING   training, then new weights; claims wait

 policy version     the training step whose weights serve now
 batch              what the next step still needs
 idle               an episode's time without an LLM call; `!` from half of what it
                    may be, then it is taken back
 informative        submitted groups whose rewards differ: only those teach
 wasted             completion tokens that nobody got: the price of the fan-out
 breaker            of a route's upstream: open while it fails

A line that begins with `!` says what is wrong and what to do. A server that does not
answer is asked again, every ten seconds at the latest, and shown again once it does.
`as of` says how old what you see is.
"""


class HelpScreen(ModalScreen[None]):
    """The text, until any of its keys."""

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
            yield Static(HELP, markup=False)
