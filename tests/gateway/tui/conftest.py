"""The monitor without a terminal, in front of real servers on sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.tui.targets import make_targets

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from gateway.tui.app import MonitorApp

#: Seconds; how long anything may take on a machine that has much else to do.
DEADLINE = 60.0


@dataclass
class Screen:
    """What somebody in front of the terminal sees and presses."""

    app: MonitorApp
    pilot: Pilot[None]

    @property
    def text(self) -> str:
        """All that is on the screen, as lines."""
        return "\n".join(strip.text.rstrip() for strip in self.app.screen._compositor.render_strips())

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[str], bool], what: str = "") -> str:
        """The first screen that fulfils ``condition``."""
        try:
            async with asyncio.timeout(DEADLINE):
                while not condition(text := self.text):
                    await self.pilot.pause(0.02)
                return text
        except TimeoutError:
            raise AssertionError(f"{what or 'it'} is not on the screen:\n{self.text}") from None

    async def shows(self, *words: str) -> str:
        """The first screen with all of ``words``.

        What is to be there as well belongs in here: a widget that grows shows its last lines one layout later.
        """
        return await self.until(lambda text: all(word in text for word in words), " and ".join(words))

    async def says(self, sentence: str) -> str:
        """The first screen with ``sentence``, wherever its lines break."""
        return await self.until(lambda text: sentence in " ".join(text.split()), sentence)


@asynccontextmanager
async def watching(
    swarm: list[str] = [],  # noqa: B006
    gateways: list[str] = [],  # noqa: B006
    *,
    size: tuple[int, int] = (140, 50),
) -> AsyncGenerator[Screen]:
    """A monitor of these servers in a terminal of ``size`` (columns, rows)."""
    # textual takes long to import, and most tests here do without
    from gateway.tui.app import MonitorApp

    app = MonitorApp(make_targets(swarm, None, gateways, None), interval=0.2)
    async with app.run_test(size=size) as pilot:
        yield Screen(app, pilot)
