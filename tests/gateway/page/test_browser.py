"""The page in a real browser, through a gateway before the stand-in swarm: every screen, every key, what happens when
the gateway is gone, slow, or the login over; and texts that would like to run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from gateway.keys.store import KeyFile
from swarm.server.journal.erasure import note_export
from tests.gateway.conftest import CHAT, OpenGateway, gateway_before
from tests.gateway.page.browser import Browser, Tab, chromium
from tests.gateway.page.conftest import Site, site_before
from tests.gateway.page.test_kept_groups import held
from tests.standins.swarm import Swarm, said
from tests.standins.upstream import Upstream
from tests.standins.vllm import plain_choice, several
from tests.swarm.server import conftest as server

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]

rig = server.rig
overrides = server.overrides

_PAYLOADS = (
    "<script>window.ran=1</script>",
    "<img src=x onerror=window.ran=1>",
    "<svg onload=window.ran=1>",
    '"><iframe srcdoc="<script>parent.ran=1</script>">',
    "javascript:window.ran=1",
    "</textarea></title><script>window.ran=1</script>",
    "{{constructor.constructor('window.ran=1')()}}",
    "<a href=javascript:window.ran=1>go</a>",
    "\u202eright to left \u0000 nothing \U0001f600 \u2028 line",
    "<math><mi//xlink:href='data:x,<script>window.ran=1</script>'>",
)
_AROUND = ("%", "a % b", "'%'", '"%"', "`%`", "<p>%</p>", "<!--%-->", "</div>%", "&lt;%", "\n\n% \n")
#: Each payload in each surrounding, and what hypothesis makes of them.
HOSTILE = [around.replace("%", payload) for payload in _PAYLOADS for around in _AROUND]


@settings(max_examples=400, database=None, phases=[Phase.generate])
@given(st.lists(st.sampled_from([*_PAYLOADS, *_AROUND]) | st.text(max_size=20), min_size=1, max_size=4).map("".join))
def _invent(text: str) -> None:
    HOSTILE.append(text)


@pytest.fixture
async def open_site(open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path) -> AsyncIterator[Site]:
    assert swarm.job is not None
    # half as many groups may be open
    swarm.job = swarm.job.model_copy(update={"batch_size": 64})
    async with site_before(open_gateway, tmp_path, feedback_window_seconds=1000, acknowledge_seconds=0.0) as site:
        yield site


async def log_in(tab: Tab, site: Site, scope: str = "judge", place: str = "") -> None:
    await tab.goto(f"{site.url}/ui{place}")
    await tab.sees("Log in")
    await tab.write(site.keys[scope])
    await tab.press("Enter")
    await tab.sees("Log out")


async def open_group(tab: Tab, site: Site, prompt: str) -> None:
    """Log in, and open the group of ``prompt``, which is the latest."""
    await log_in(tab, site)
    await tab.sees(prompt)
    await tab.press("Enter")
    await tab.sees("Which answer is best?")


async def test_every_screen_and_every_key(open_site: Site, chrome: Browser) -> None:
    site = open_site
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.sees("No group yet")
        for text in ("first prompt", "second prompt", "third prompt"):
            await site.ask(text)
        # by the stream: nothing is pressed
        await tab.sees("third prompt")
        selected = "document.querySelector('.row[aria-current] .prompt')?.innerText"
        await tab.until(selected, lambda prompt: prompt == "third prompt")
        await tab.until("document.querySelectorAll('.row').length === 3")
        await tab.press("j", "j", "j", "k")
        assert await tab.js(selected) == "second prompt"
        await tab.press("/")
        await tab.write("first")
        await tab.press("Enter")
        await tab.until("document.querySelectorAll('.row').length === 1")
        await tab.press("Escape", "g")
        await tab.until("document.querySelectorAll('.row').length === 3")
        await tab.press("v")
        await tab.until("location.hash.includes('unjudged')")
        await tab.press("Enter")
        await tab.sees("Which answer is best? Your pick trains.")
        assert await tab.js("document.querySelectorAll('.card').length") == 4
        await tab.press("b")
        await tab.sees("hidden", ".card")
        assert "the user got this" not in await tab.text("main") and "words are" not in await tab.text("main")
        await tab.press("2")
        await tab.sees("You picked")
        assert "the user got this" in await tab.text("main"), "judged: nothing is hidden any more"
        await tab.press("u")
        await tab.sees("Which answer is best? Your pick trains.")
        await tab.press("b", "l", "e")
        await tab.until("document.activeElement.tagName === 'TEXTAREA'")
        await tab.write(" corrected")
        await tab.js("[...document.querySelectorAll('.editor button')][0].click()")
        await tab.sees("answer 2, corrected")
        await tab.press("d", "o", "0")
        await tab.sees("You said that none is good")
        before = await tab.js("location.hash")
        await tab.press("j")
        await tab.until("location.hash", lambda place: place != before)
        await tab.press("Escape")
        await tab.until("document.querySelectorAll('.row').length > 0")
        await tab.press("?")
        await tab.sees("open the group", "dialog")
        await tab.press("Escape", "i")
        await tab.sees("The hook's report card")
        await tab.sees("Now: collecting answers.")
        await tab.press("p")
        await tab.sees("The trained model answers everybody")
        assert tab.faults == []


async def test_a_group_is_saved_as_one_file_that_runs_nothing(site: Site, chrome: Browser, tmp_path: Path) -> None:
    await site.ask("<script>x</script> & more")
    async with chrome.tab() as tab:
        await tab.command("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        await log_in(tab, site, "look")
        await tab.sees("more")
        await tab.press("Enter")
        await tab.sees("Your key may look")
        await tab.press("s")
        async with asyncio.timeout(20):
            while not (files := list(tmp_path.glob("group-*.html"))):  # noqa: ASYNC240
                await tab.js("new Promise((done) => setTimeout(done, 20))")
        text = files[0].read_text()
        assert "<script" not in text and "&lt;script&gt;x" in text and "default-src 'none'" in text
        assert "<button" not in text and "words are" in text


async def test_hostile_texts_neither_run_nor_break_the_page(open_site: Site, swarm: Swarm, chrome: Browser) -> None:
    site = open_site
    _invent()
    assert len(HOSTILE) >= 500
    texts = iter(HOSTILE)

    def answer(body: dict[str, object], number: int) -> Response:
        text = next(texts)
        call = {"id": "c", "type": "function", "function": {"name": text, "arguments": json.dumps({"a": text})}}
        return said(text or "-", reasoning_content=text, tool_calls=[call])

    swarm.answer = answer
    for number in range(0, 500, 4):
        response = await site.ask(HOSTILE[number] or "-")
        assert response.status_code == 200, (HOSTILE[number], response.text)
    visitor = await site.visit("judge")
    groups = await visitor.groups(limit=500)
    assert len(groups) >= 125
    await visitor.judge(groups[0]["id"], pick=0, comment=HOSTILE[0], correction=HOSTILE[10])
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.until("document.querySelectorAll('.row').length >= 100")
        for group in groups:
            await tab.js(f"document.querySelector('main').replaceChildren(); location.hash = '#/group/{group['id']}'")
            await tab.until("document.querySelectorAll('.card').length === 4")
        await tab.press("o")
        assert await tab.js("window.ran") is None and await tab.js("document.scripts.length") == 1
        assert await tab.js("document.querySelectorAll('iframe, main img, math, main script').length") == 0
        assert tab.faults == []


@asynccontextmanager
async def taken_over(rig: server.Rig, upstream: Upstream, folder: Path) -> AsyncGenerator[Site]:
    """A page whose one route has an incumbent before a challenger in the shadow."""
    rig.vllm.default = lambda sent: several(plain_choice([1]), plain_choice([1, 2, 3], index=1))(sent)
    serve = {"incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}}, "canary": {"shares": [0.005]}}
    url = str(rig.client.base_url)

    @asynccontextmanager
    async def opened(**more: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with gateway_before(url, folder, serve=serve, **more) as http:
            yield http

    async with site_before(opened, folder) as site:
        await site.ask()
        async with asyncio.timeout(60):
            while not (await rig.client.get("/status")).json()["comparisons"]:
                pass
        yield site


async def test_a_challenger_of_a_takeover_is_seen_and_moved(
    rig: server.Rig, upstream: Upstream, chrome: Browser, tmp_path: Path
) -> None:
    stages = rig.controller.pool.stages
    async with taken_over(rig, upstream, tmp_path) as site, chrome.tab() as tab:
        await log_in(tab, site, "decide", "#/policies")
        await tab.sees("The incumbent answers everybody; the challenger learns behind it.")
        await tab.sees("not decided")
        for words, why, then in (
            ("Promote to 0.5 %", "looks good", "The challenger answers 0.5 % of the conversations"),
            ("Pin", "a holiday", "pinned"),
            ("Roll back", "it rambles", "The incumbent answers everybody"),
        ):
            buttons = "[...document.querySelectorAll('.moves button')]"
            await tab.js(f"{buttons}.find((button) => button.innerText === '{words}').click()")
            await tab.sees(words, "dialog")
            await tab.write(why)
            await tab.press("Enter")
            await tab.sees(then, "main")
            await tab.sees(why, "main")
        assert tab.faults == []
    stage = stages.find("default", "")
    assert (stage.share, stage.why) == (0.0, "it rambles") and "Dana" in stage.by


async def test_data_of_a_session_is_seen_and_deleted(
    rig: server.Rig, upstream: Upstream, chrome: Browser, tmp_path: Path
) -> None:
    async with taken_over(rig, upstream, tmp_path) as site, chrome.tab() as tab:
        note_export(Path((await rig.client.get("/status")).json()["run_dir"]) / "journal.db", "everything.jsonl")
        await log_in(tab, site, "admin", "#/data")
        await tab.sees("What is kept?")
        [app] = [key for key in KeyFile(tmp_path / "keys.json").read() if key.label == "shop"]
        await tab.js("document.querySelector('input[name=key]').focus()")
        await tab.write(app.id)
        await tab.press("Enter")
        await tab.sees("Kept: episodes 2")
        await hold(tab, "/data/delete")
        await tab.js("document.querySelector('.moves button').focus()")
        enter = {"type": "keyDown", "key": "Enter", "text": "\r"}
        await tab.command("Input.dispatchKeyEvent", **enter)
        await tab.sees("Weights that learned from it stay", "dialog")
        await tab.command("Input.dispatchKeyEvent", **enter, autoRepeat=True)
        assert await tab.js("held.length") == 0, "the key is still down that opened the dialog"
        await tab.command("Input.dispatchKeyEvent", **(enter | {"type": "keyUp"}))
        await tab.sees("May hold it, and is yours to delete: everything.jsonl", "dialog")
        for _ in range(2):
            await tab.js("document.querySelector('dialog button.main').click()")
        assert await tab.js("held.length") == 1, "the second one would find nothing, and say so"
        # a long file is written anew
        await tab.js(
            "void (window.clock = performance.now.bind(performance), performance.now = () => clock() + 60_000)"
        )
        await tab.sees("The gateway takes long to answer", "#banner")
        await let_in(tab)
        await tab.sees("Deleted: episodes 2")
        assert tab.faults == []


async def test_what_is_kept_of_a_name_that_is_written_no_more_is_not_shown(
    rig: server.Rig, upstream: Upstream, chrome: Browser, tmp_path: Path
) -> None:
    read = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/data?')).length"
    async with taken_over(rig, upstream, tmp_path) as site, chrome.tab() as tab:
        await log_in(tab, site, "admin", "#/data")
        await tab.sees("What is kept?")
        await hold(tab, "/data?")
        await tab.js("document.querySelector('input[name=session]').focus()")
        await tab.write("first")
        await tab.press("Enter")
        await tab.until("held.length == 1")
        await tab.write(" and another")
        await let_in(tab)
        await tab.until(read)
        await tab.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert await tab.text("form.data + div") == "", "a deletion would be of the first one"
        await tab.press("Enter")
        await tab.sees("Kept: no episodes")
        assert tab.faults == []


async def test_a_tab_that_nobody_sees_opens_no_stream_when_the_gateway_is_back(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.sees("No group yet")
        await tab.js("""void (window.streams = [], window.EventSource = class extends EventSource {
                constructor(address) { super(address); streams.push(this); }
            }, Object.defineProperty(document, 'hidden', { configurable: true, get: () => window.nobody }),
            window.look = (seen) => (window.nobody = !seen, document.dispatchEvent(new Event('visibilitychange'))),
            look(false), look(true))""")
        await tab.until("streams.length == 1")
        await hold(tab, "/me")
        await tab.js("void streams[0].dispatchEvent(new MessageEvent('bye'))")
        await tab.until("held.length == 1")
        await tab.js("look(false)")
        await let_in(tab)
        await site.ask("hello there")
        await tab.js("look(true)")
        await tab.sees("hello there")
        assert await tab.js("streams.filter((each) => each.readyState !== 2).length") == 1
        assert tab.faults == []


#: Each screen, and words that say that it is there.
SCREENS = {
    "#/groups": "hello there",
    "#/group/": "Which answer is best?",
    "#/learning": "report card",
    "#/policies": "The trained model answers everybody",
    "#/data": "Other ways to opt out",
}
#: Have a screen ask the gateway anew; that of the data asks what its form says.
_ASK = """(() => {
    const form = document.querySelector('form.data');
    if (!form) return void dispatchEvent(new HashChangeEvent('hashchange'));
    form.key.value = 'any';
    form.requestSubmit();
})()"""


async def hold(tab: Tab, part: str = "") -> None:
    """What the page asks from now on, at addresses with ``part``, is asked once it is let in, whatever the machine does
    meanwhile."""
    await tab.js(f"""void (window.held = [], window.real = fetch, window.fetch = (path, options) =>
        new Promise((go) => {{
            const ask = () => go(real(path, options));
            if (path.includes('{part}')) held.push(ask);
            else ask();
        }}))""")


async def let_in(tab: Tab) -> None:
    """End :func:`hold`."""
    await tab.js("void (window.fetch = real, held.splice(0).forEach((ask) => ask()))")


async def network(tab: Tab, *, offline: bool) -> None:
    """Cut the tab off its network, or give it back."""
    nothing = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await tab.command("Network.enable")
    await tab.command("Network.emulateNetworkConditions", offline=offline, **nothing)


@pytest.mark.parametrize(("place", "words"), SCREENS.items())
async def test_each_screen_says_that_the_gateway_is_slow_or_gone_or_the_login_over(
    site: Site, chrome: Browser, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    await site.ask("hello there")
    if place == "#/group/":
        place += (await (await site.visit("look")).groups())[0]["id"]
    async with chrome.tab() as tab:
        await log_in(tab, site, "admin", place)
        await tab.sees(words)
        await hold(tab)
        await tab.js(_ASK)
        await tab.sees("The gateway takes long to answer", "#banner")
        await let_in(tab)
        await tab.until("document.querySelector('#banner').hidden")
        await tab.sees(words)
        await network(tab, offline=True)
        await tab.js(_ASK)
        await tab.sees("The gateway cannot be reached.", "main")
        await network(tab, offline=False)
        await tab.js(_ASK)
        await tab.sees(words)
        # a new login goes on where the old one was
        monkeypatch.setattr("gateway.page.login.time", SimpleNamespace(monotonic=lambda: 1e12))
        await tab.js(_ASK)
        await tab.sees("your login has expired: log in again")
        monkeypatch.undo()
        await tab.write(site.keys["judge"])
        await tab.press("Enter")
        await tab.sees(words)
        assert (await tab.js("location.hash"), tab.faults) == (place, [])


async def test_what_comes_late_does_not_take_the_place_of_another_screen(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.sees("No group yet")
        await hold(tab, "/learning")
        read = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/api/learning')).length"
        before = await tab.js(read)
        await tab.press("p")
        await tab.until("document.querySelector('nav a[data-screen=policies]').hasAttribute('aria-current')")
        await tab.press("a")
        await tab.sees("Other ways to opt out")
        await let_in(tab)
        await tab.until(read, lambda count: count > before)
        await tab.sees("Other ways to opt out")


async def test_figures_go_on_once_somebody_looks_at_the_tab_again(site: Site, chrome: Browser) -> None:
    read = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/api/learning')).length"
    async with chrome.tab() as tab:
        await log_in(tab, site, place="#/learning")
        await tab.sees("report card")
        await tab.js("""void (window.wait = setTimeout, window.setTimeout = (does, ms) => wait(does, ms / 100),
            window.again = setInterval, window.setInterval = (does, ms) => again(does, ms / 100),
            Object.defineProperty(document, 'hidden', { configurable: true, get: () => window.nobody }),
            window.nobody = true, dispatchEvent(new HashChangeEvent('hashchange')))""")
        await tab.js("new Promise((done) => wait(done, 1000))")
        before = await tab.js(read)
        await tab.js("void (window.nobody = false, document.dispatchEvent(new Event('visibilitychange')))")
        await tab.until(read, lambda count: count > before)
        assert tab.faults == []


async def test_news_of_one_group_does_not_take_the_place_of_the_next(site: Site, chrome: Browser) -> None:
    for text in ("first prompt", "second prompt"):
        await site.ask(text)
    visitor = await site.visit("judge")
    second = (await visitor.groups())[0]["id"]
    async with chrome.tab() as tab:
        await log_in(tab, site, "decide")
        await tab.until("document.querySelectorAll('.row').length === 2")
        await tab.press("Enter")
        await tab.sees("1 of 2")
        await hold(tab, "/groups/")
        await tab.press("j")
        await tab.until("held.length", lambda count: count == 1)
        await visitor.judge(second, pick=0)
        await tab.until("held.length", lambda count: count == 2)
        await tab.js("held[0]()")
        await tab.sees("2 of 2")
        read = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/groups/')).length"
        before = await tab.js(read)
        await tab.js("held[1]()")
        await tab.until(read, lambda count: count > before)
        assert await tab.js(
            "new Promise((done) => setTimeout(() => done(document.body.innerText.includes('2 of 2')), 50))"
        )


async def test_a_name_is_asked_for_as_it_is_however_long(site: Site, chrome: Browser) -> None:
    name = "chat-" + "7" * 250
    async with chrome.tab() as tab:
        await log_in(tab, site, "decide", "#/data")
        await tab.sees("Opt out")
        await tab.js("document.querySelector('input[name=session]').focus()")
        await tab.write(name)
        await tab.press("Enter")
        await tab.sees(name, "dialog")


async def test_who_judges_blind_sees_an_answer_that_comes_late(
    open_gateway: OpenGateway, swarm: Swarm, chrome: Browser, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"quorum": 3, "feedback_window_seconds": 1000, "acknowledge_seconds": 0.0}
    late = held(swarm)
    async with site_before(open_gateway, tmp_path, **settings) as site, chrome.tab() as tab:
        await site.ask("a prompt")
        await log_in(tab, site)
        await tab.sees("a prompt")
        await tab.press("Enter")
        await tab.until("document.querySelectorAll('.card').length === 3")
        await tab.press("b")
        await tab.sees("hidden", ".card")
        late.set()
        await tab.until("document.querySelectorAll('.card').length === 4")
        assert tab.faults == []


async def test_the_arguments_of_a_call_are_those_that_the_model_wrote(
    site: Site, swarm: Swarm, chrome: Browser
) -> None:
    written = {"whole": '{"id": 12345678901234567890, "a": 1}', "plain": '{"b":[1, 2]}'}
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in written.items()
    ]
    swarm.answer = lambda body, number: said("-", tool_calls=calls)
    await site.ask("a prompt")
    async with chrome.tab() as tab:
        await open_group(tab, site, "a prompt")
        await tab.press("o")
        await tab.sees(written["whole"], ".card")
        await tab.sees('"b": [', ".card")


async def test_messages_of_odd_forms_are_shown(site: Site, chrome: Browser) -> None:
    odd = [{"role": "assistant", "content": 5, "tool_calls": calls} for calls in ({"a": 1}, "text", 5, [None, 5])]
    messages = [*odd, {"role": "user", "content": "a prompt", "tool_calls": {}}]
    answer = await site.http.post(CHAT, json={"messages": messages}, headers={"x-api-key": site.keys["app"]})
    assert answer.status_code == 200
    async with chrome.tab() as tab:
        await open_group(tab, site, "a prompt")
        assert tab.faults == []


async def test_a_small_reward_is_not_shown_as_none(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site)
        values = "[0, 0.0004, -0.0002, 0.0006, 0.25, 1.5e6, 0.1 + 0.2 - 0.3]"
        shown = await tab.js(f"import('/ui/dom.js').then(({{ number }}) => {values}.map((value) => number(value, 3)))")
        assert shown == ["0", "4.0e-4", "-2.0e-4", "0.001", "0.25", "1.5e+6", "0"]


async def test_all_is_said_of_all_alone(site: Site, chrome: Browser) -> None:
    async with chrome.tab() as tab:
        await log_in(tab, site)
        shares = "[0, 0.0034, 0.25, 0.5714, 0.994, 299 / 300, 1]"
        shown = await tab.js(f"import('/ui/dom.js').then(({{ percent }}) => {shares}.map(percent))")
        assert shown == ["0 %", "0.34 %", "25 %", "57 %", "99 %", "> 99 %", "100 %"]


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ((0.9951, 0.9955), ["0.9951", "0.9952", "0.9953", "0.9954", "0.9955"]),
        ((0.0, 1.0), ["0", "0.25", "0.5", "0.75", "1"]),
        ((-20.0, 300.0), ["-20", "60", "140", "220", "300"]),
    ],
)
async def test_an_axis_has_numbers_that_differ(
    site: Site, chrome: Browser, rewards: tuple[float, float], told: list[str]
) -> None:
    points = [{"step": step, "value": value} for step, value in enumerate(rewards)]
    line = json.dumps([{"name": "training", "kind": "train", "points": points}])
    async with chrome.tab() as tab:
        await log_in(tab, site)
        of_curve = await tab.js(f"""import('/ui/draw.js').then(({{ curve }}) =>
            [...curve({line}, '').querySelectorAll('.tick[text-anchor=end]')].map((tick) => tick.textContent))""")
        of_list = await tab.js(f"""import('/ui/draw.js').then(({{ scale, ticks }}) =>
            [...ticks(scale({list(rewards)})).querySelectorAll('.tick')].map((tick) => tick.textContent))""")
    assert (of_curve, of_list) == (told, told[::2])


async def test_an_earlier_turn_has_its_words_and_its_calls(site: Site, chrome: Browser) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"for": "chains"}'}}
    turns = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing found"},
    ]
    answer = await site.http.post(CHAT, json={"messages": turns}, headers={"x-api-key": site.keys["app"]})
    assert answer.status_code == 200
    async with chrome.tab() as tab:
        await open_group(tab, site, "a question")
        await tab.press("o")
        await tab.sees('Let me look.\n→ search({"for": "chains"})', ".question")


async def test_a_group_that_comes_while_the_list_is_read_is_in_it(site: Site, chrome: Browser) -> None:
    await site.ask("first prompt")
    async with chrome.tab() as tab:
        await log_in(tab, site)
        await tab.sees("first prompt")
        # the answer to the list has come, and is not there yet
        await tab.js("""void (window.real = fetch, window.fetch = async (path, options) => {
            const answer = await real(path, options);
            if (path.includes('/groups?')) await new Promise((go) => (window.let = go));
            return answer;
        }, document.querySelector('.rows').dataset.old = 'yes')""")
        await tab.press("r")
        await tab.until("!!window.let")
        await site.ask("second prompt")
        await tab.sees("second prompt")
        await tab.js("void (window.fetch = real, window.let())")
        await tab.until("!document.querySelector('.rows').dataset.old")
        assert "second prompt" in await tab.text(".rows")
        assert tab.faults == []


async def test_what_happens_to_a_group_before_the_stream_is_open_is_shown(open_site: Site, chrome: Browser) -> None:
    site = open_site
    await site.ask("a prompt")
    [group] = await (await site.visit("judge")).groups()
    async with chrome.tab() as tab:
        # somebody judges between the group and the stream
        source = """window.EventSource = class extends EventSource {
            constructor(url) {
                const judging = new XMLHttpRequest();
                judging.open('POST', '/ui/api/groups/GROUP/judgement', false);
                judging.setRequestHeader('content-type', 'application/json');
                judging.send('{"pick": 0}');
                super(url);
            }
        }"""
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=source.replace("GROUP", group["id"]))
        await log_in(tab, site, place=f"#/group/{group['id']}")
        await tab.sees("You picked 1.")
        assert tab.faults == []


async def test_a_long_answer_stays_where_it_is_read_while_others_judge(
    open_site: Site, swarm: Swarm, chrome: Browser
) -> None:
    swarm.answer = lambda body, number: said("line\n" * 400)
    site = open_site
    await site.ask("a prompt")
    visitor = await site.visit("decide")
    group = (await visitor.groups())[0]["id"]
    async with chrome.tab() as tab:
        await log_in(tab, site, "judge", f"#/group/{group}")
        await tab.sees("Which answer is best?")
        await tab.js("void (document.querySelector('.card > .text').scrollTop = 300)")
        await visitor.judge(group, pick=0)
        await tab.sees("Dana", ".said")
        assert await tab.js("document.querySelector('.card > .text').scrollTop") == 300


async def test_the_correction_of_an_answer_that_is_cut_begins_without_the_note(
    site: Site, swarm: Swarm, chrome: Browser
) -> None:
    swarm.answer = lambda body, number: said("word " * 20_000)
    await site.ask("a prompt")
    visitor = await site.visit("judge")
    (group,) = await visitor.groups()
    async with chrome.tab() as tab:
        await log_in(tab, site, "judge", f"#/group/{group['id']}")
        await tab.sees("more characters are not kept", ".card")
        await tab.press("e")
        await tab.until("document.activeElement.tagName === 'TEXTAREA'")
        await tab.js("document.querySelector('.editor button').click()")
        await tab.sees("answer 1, corrected")
    judged = (await visitor.get(f"/groups/{group['id']}"))["judgements"]
    assert [pick["correction"].endswith("word w") for pick in judged.values()] == [True]


async def test_news_of_a_group_that_does_not_fit_make_it_no_new_one(site: Site, chrome: Browser) -> None:
    await site.ask("first prompt")
    visitor = await site.visit("decide")
    (group,) = await visitor.groups()
    async with chrome.tab() as tab:
        await log_in(tab, site, place="#/groups?view=disagree")
        await tab.sees("No group fits")
        await tab.js("""void (window.judged = 0, window.others = new EventSource('/ui/api/events?last='),
            others.addEventListener('group', ({ data }) => (judged += 'Dana' in JSON.parse(data).picks)))""")
        await tab.until("others.readyState === 1")
        await visitor.judge(group["id"], pick=group["rewards"].index(max(group["rewards"])))
        await tab.until("judged")
        await tab.js("new Promise((done) => setTimeout(done, 1000))")
        assert await tab.js("document.querySelector('.pill').hidden"), await tab.text(".pill")
        await site.ask("second prompt")
        await tab.sees("1 new group", ".pill")


async def test_a_key_is_opted_out_once_it_is_said_what_that_does(site: Site, chrome: Browser, tmp_path: Path) -> None:
    [app] = [key for key in KeyFile(tmp_path / "keys.json").read() if key.label == "shop"]
    async with chrome.tab() as tab:
        await log_in(tab, site, "decide", "#/data")
        await tab.sees("What is kept of somebody, and its deletion, need a key that was made with --admin")
        await tab.js("document.querySelector('input[name=key]').focus()")
        await tab.write(app.id)
        await tab.press("Enter")
        await tab.sees("from now on neither kept nor trained", "dialog")
        assert not (tmp_path / "keys.json.refusals").exists()
        await tab.press("Enter")
        await tab.sees(f"From now on nothing of the key {app.id} is kept or trained.")
        assert app.id in (tmp_path / "keys.json.refusals").read_text()
        assert tab.faults == []


@pytest.mark.parametrize("width", [1280, 390])
async def test_no_screen_is_wider_than_its_window(site: Site, chrome: Browser, width: int) -> None:
    await site.ask("a prompt " + "withoutanyspace" * 30)
    async with chrome.tab(width, 800) as tab:
        await log_in(tab, site)
        await tab.sees("a prompt")
        for key, words in (
            ("Enter", "Which answer"),
            ("i", "report card"),
            ("p", "trained model"),
            ("a", "Other ways to opt out"),
            ("g", "a prompt"),
        ):
            await tab.press(key)
            await tab.sees(words)
            assert await tab.js("document.documentElement.scrollWidth <= innerWidth"), words
