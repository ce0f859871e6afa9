"""The page for who has no mouse: what has the keyboard keeps it, and the skip link skips."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.gateway.page.browser import Browser, Tab, chromium
from tests.gateway.page.conftest import Site
from tests.gateway.page.test_browser import log_in, open_group

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]

_TAB = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
_FOCUSED = "document.activeElement.textContent"


async def _tab_to(tab: Tab, words: str) -> None:
    """Press Tab until what says these words has the keyboard."""
    for _ in range(40):
        await tab.command("Input.dispatchKeyEvent", type="keyDown", **_TAB)
        await tab.command("Input.dispatchKeyEvent", type="keyUp", **_TAB)
        if await tab.js(_FOCUSED) == words:
            return
    raise AssertionError(f"no Tab leads to {words!r}")


async def test_the_skip_link_leads_to_the_content_of_the_screen(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site, place="#/learning")
        await tab.sees("report card")
        await _tab_to(tab, "Skip to the content")
        await tab.press("Enter")
        await tab.until("document.activeElement.id === 'main'")
        await _tab_to(tab, "Save as a file")
        assert (await tab.js("location.hash"), tab.faults) == ("#/learning", [])


async def _news_of_the_list(site: Site, tab: Tab) -> None:
    await site.ask("second prompt")
    await tab.sees("second prompt")


async def _news_of_figures(site: Site, tab: Tab) -> None:
    await tab.js("document.querySelector('main').firstChild.dataset.old = 'yes'")
    await tab.press("r")
    await tab.until("!document.querySelector('main [data-old]')")


@pytest.mark.parametrize(
    ("place", "words", "news"),
    [("#/groups", "first prompt", _news_of_the_list), ("#/learning", "Save as a file", _news_of_figures)],
)
async def test_what_has_the_keyboard_keeps_it_when_news_come(
    site: Site, chrome: Browser, place: str, words: str, news: Callable[[Site, Tab], Awaitable[None]]
) -> None:
    await site.ask("first prompt")
    async with chrome.tab() as tab:
        await log_in(tab, site, place=place)
        await tab.sees(words)
        await _tab_to(tab, words)
        await news(site, tab)
        assert (await tab.js(_FOCUSED), tab.faults) == (words, [])


async def test_what_has_the_keyboard_and_is_gone_gives_it_to_no_other_of_its_name(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await _tab_to(tab, "?")
        await tab.js("""void import('/ui/dom.js').then(({ h, show }) => {
            const route = (name, ...moves) => h("section", {}, name, moves.map((move) => h("button", {}, move)));
            const routes = document.getElementById("who");
            show(routes, route("one", "Roll back", "Pin"), route("two", "Roll back", "Pin"));
            routes.querySelector("button").focus();
            show(routes, route("one", "Pin"), route("two", "Roll back", "Pin"));
            window.shown = true;
        })""")
        await tab.until("window.shown")
        assert (await tab.js("document.activeElement.tagName"), tab.faults) == ("BODY", [])


async def test_a_correction_that_is_being_written_is_not_lost_by_a_key(site: Site, chrome: Browser) -> None:
    for text in ("first prompt", "second prompt"):
        await site.ask(text)
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.until("document.querySelectorAll('.row').length === 2")
        await tab.press("Enter")
        await tab.sees("1 of 2")
        await tab.press("l", "e")
        await tab.until("document.activeElement.tagName === 'TEXTAREA'")
        await tab.write(" corrected")
        written = await tab.js("document.querySelector('textarea').value")
        # a click on another answer, to compare
        await tab.js("document.activeElement.blur()")
        await tab.press("1")
        await tab.sees("You picked 1.")
        await tab.press("j")
        await tab.sees("2 of 2")
        assert not await tab.js("!!document.querySelector('textarea')")
        # who goes through the list writes nothing into it
        for key, position in (("k", 1), ("j", 2), ("k", 1)):
            await tab.press(key)
            await tab.sees(f"{position} of 2")
        await tab.until("document.querySelector('textarea')?.value", lambda text: text == written)
        await tab.press("e")
        assert await tab.js("document.activeElement.tagName") == "TEXTAREA"
        await tab.js("document.querySelector('.editor button').click()")
        await tab.sees("answer 2, corrected")
        await tab.press("j")
        await tab.sees("2 of 2")
        await tab.press("k")
        await tab.sees("1 of 2")
        assert not await tab.js("!!document.querySelector('textarea')")
        assert tab.faults == []


async def test_a_correction_keeps_the_keyboard_while_the_group_is_drawn_anew(site: Site, chrome: Browser) -> None:
    await site.ask("first prompt")
    async with chrome.tab() as tab:
        await open_group(tab, site, "first prompt")
        # what is read behind the pick comes late
        await tab.js("""void (window.real = fetch, window.late = new Promise((done) => (window.release = done)),
            window.fetch = async (path, how) => { if (how.method === 'GET') await late; return real(path, how); })""")
        await tab.press("1")
        await tab.sees("Picked 1.")
        await tab.press("e")
        await tab.write(" corrected")
        await tab.js("void release()")
        await tab.sees("You picked 1.")
        assert await tab.js("document.activeElement.tagName") == "TEXTAREA"
        assert (await tab.js("document.activeElement.value")).endswith(" corrected")
        assert tab.faults == []


async def test_a_correction_that_is_being_written_is_its_writers(site: Site, chrome: Browser) -> None:
    await site.ask("first prompt")
    log_out = "[...document.querySelectorAll('.who button')].find((it) => it.innerText === 'Log out').click()"
    async with chrome.tab() as tab:
        await open_group(tab, site, "first prompt")
        await tab.press("e")
        await tab.write(" corrected")
        for scope, is_writer in (("decide", False), ("judge", True)):
            await tab.js(log_out)
            await tab.sees("You are logged out.")
            await tab.write(site.keys[scope])
            await tab.press("Enter")
            await tab.sees("Which answer is best?")
            assert await tab.js("!!document.querySelector('textarea')") is is_writer
        assert tab.faults == []


async def test_what_is_marked_to_be_copied_stays_marked(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site, place="#/learning")
        await tab.sees("report card")
        # as if each second were a hundredth
        await tab.js("""void (window.again = setInterval, window.ticks = 0,
            window.setInterval = (does, ms) => again(() => (does(), ms === 10_000 && ticks++), ms / 100),
            document.querySelector('main').firstChild.dataset.old = 'yes',
            dispatchEvent(new HashChangeEvent('hashchange')))""")
        await tab.until("!document.querySelector('main [data-old]')")
        # a reading ends the ticks until it is drawn, and one that is under way may still be drawn
        await tab.until("""new Promise((done) => {
            getSelection().selectAllChildren(document.querySelector('main h2'));
            const begun = ticks;
            const look = () => ticks < begun + 3 ? setTimeout(look)
                : done(String(getSelection()) === document.querySelector('main h2').innerText);
            look();
        })""")
        await tab.js("document.querySelector('main').firstChild.dataset.old = 'yes'")
        await tab.js("void getSelection().removeAllRanges()")
        await tab.until("!document.querySelector('main [data-old]')")
        assert tab.faults == []
