"""The page before programs that others wrote to find faults: TypeScript's checker, and axe in the browser.

Both come from npm into a folder of their own, as the clients do; without npm or its registry, the tests say so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import PAGE_CHECKS
from tests.gateway.page.browser import Browser, Tab, chromium
from tests.gateway.page.conftest import Site
from tests.gateway.page.test_browser import log_in, taken_over
from tests.gateway.page.test_browser import overrides as overrides
from tests.gateway.page.test_browser import rig as rig
from tests.standins.upstream import Upstream
from tests.swarm.server import conftest as server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STATIC = Path(__file__).parents[3] / "gateway" / "page" / "static"
_RUN = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map(
    (one) => `${one.id}: ${one.nodes.map((node) => node.target.join(' ') + ' ' + node.failureSummary).join(' | ')}`))"""


@pytest.fixture
def checks() -> Path:
    """The folder of the checkers."""
    if not PAGE_CHECKS.installed:
        if shutil.which("npm") is None:
            pytest.skip("npm is not here: the page's types and accessibility are not checked")
        try:
            PAGE_CHECKS.install()
        except (subprocess.SubprocessError, SystemExit) as exc:
            pytest.skip(f"npm installs no checkers here: the page's types and accessibility are not checked ({exc})")
    return PAGE_CHECKS.folder / "node_modules"


def test_the_scripts_have_no_fault_of_types(checks: Path, tmp_path: Path) -> None:
    options = {"checkJs": True, "allowJs": True, "noEmit": True, "target": "es2024", "module": "esnext", "types": []}
    options |= {"lib": ["es2024", "dom", "dom.iterable"], "moduleResolution": "bundler"}
    options |= {"paths": {"/ui/*": [f"{STATIC}/*"]}}
    project = {"compilerOptions": options, "include": [f"{STATIC}/*.js"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(project))
    done = subprocess.run(
        [checks / ".bin" / "tsc", "-p", tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(
    checks: Path, rig: server.Rig, upstream: Upstream, chrome: Browser, tmp_path: Path, scheme: str
) -> None:
    axe = (checks / "axe-core" / "axe.min.js").read_text()

    async def clean(tab: Tab, place: str) -> None:
        await tab.js(f"{axe}; 0")
        assert await tab.js(_RUN) == [], place

    async with taken_over(rig, upstream, tmp_path) as site, chrome.tab() as tab:
        await tab.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await tab.goto(f"{site.url}/ui")
        await tab.sees("Log in")
        await clean(tab, "login")
        await log_in(tab, site, "admin")
        await tab.sees("No group yet")
        await clean(tab, "empty")
        await tab.press("?")
        await tab.sees("read anew", "dialog")
        await clean(tab, "keys")
        await tab.press("Escape", "i")
        await tab.sees("report card")
        await clean(tab, "learning")
        await tab.press("p")
        await tab.sees("Promote to")
        await clean(tab, "policies")
        await tab.js("document.querySelector('.moves button').click()")
        await clean(tab, "move")
        await tab.press("Escape", "a")
        await tab.sees("What is kept")
        await clean(tab, "data")


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH")
async def test_axe_finds_nothing_in_groups(checks: Path, site: Site, chrome: Browser) -> None:
    axe = (checks / "axe-core" / "axe.min.js").read_text()
    await site.ask("what is it?")
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.sees("what is it?")
        for keys, words in (((), "all"), (("Enter",), "Which answer"), (("b",), "hidden"), (("1",), "You picked")):
            await tab.press(*keys)
            await tab.sees(words)
            await tab.js(f"{axe}; 0")
            assert await tab.js(_RUN) == [], words
