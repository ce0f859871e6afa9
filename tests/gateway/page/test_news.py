"""What others say of a group that somebody looks at, in whichever order the gateway's answers and its events come."""

from __future__ import annotations

import pytest

from tests.gateway.page.browser import Browser, Tab, chromium
from tests.gateway.page.conftest import Site, Visitor
from tests.gateway.page.test_browser import open_group

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]


async def _hold_answers(tab: Tab) -> None:
    """What the page reads from now on comes once its place in ``held`` is called."""
    await tab.js("""void (window.held = [], window.real = fetch, window.fetch = async (path, options) => {
        const { ok, status, ...answer } = await real(path, options).then(async (it) =>
            ({ ok: it.ok, status: it.status, text: await it.text() }));
        if (options.method === 'GET') await new Promise((go) => held.push(go));
        return { ok, status, text: async () => answer.text };
    })""")


async def _open(tab: Tab, site: Site) -> tuple[Visitor, str]:
    """Open the only group, before a visitor who may judge it too; ``told`` is who judged it, as the page heard it."""
    await site.ask("a prompt")
    source = """window.EventSource = class extends EventSource {
        constructor(url) {
            super(url);
            // behind the page's own listener
            queueMicrotask(() => this.addEventListener('group', ({ data }) =>
                (window.told = Object.keys(JSON.parse(data).picks).join())));
        }
    }"""
    await tab.command("Page.addScriptToEvaluateOnNewDocument", source=source)
    await open_group(tab, site, "a prompt")
    visitor = await site.visit("decide")
    [group] = await visitor.groups()
    return visitor, group["id"]


async def test_an_answer_that_a_later_one_has_overtaken_changes_nothing(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        visitor, group = await _open(tab, site)
        await _hold_answers(tab)
        await visitor.judge(group, pick=0)
        await tab.until("held.length === 1")
        await visitor.judge(group, pick=0, comment="the newest")
        await tab.until("held.length === 2")
        await tab.js("held[1]()")
        await tab.sees("the newest", ".said")
        await tab.js("held[0]()")
        await tab.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert "the newest" in await tab.text(".said")
        assert tab.faults == []


async def test_what_others_say_while_ones_own_pick_is_read_is_shown(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        visitor, group = await _open(tab, site)
        await _hold_answers(tab)
        await tab.press("1")
        await tab.until("held.length === 1")
        await visitor.judge(group, pick=0)
        await tab.until("window.told?.includes('Dana')")
        await tab.js("held[0]()")
        await tab.sees("You picked 1.")
        await tab.until("held.length === 2")
        await tab.js("held[1]()")
        await tab.sees("Dana", ".said")
        assert tab.faults == []


async def test_what_others_say_while_somebody_writes_is_shown_once_that_is_over(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        visitor, group = await _open(tab, site)
        await tab.press("e")
        await tab.until("document.activeElement.tagName === 'TEXTAREA'")
        await visitor.judge(group, pick=0)
        await tab.until("window.told?.includes('Dana')")
        assert await tab.js("!!document.querySelector('textarea')")
        await tab.press("Escape")
        await tab.sees("Dana", ".said")
        assert tab.faults == []
