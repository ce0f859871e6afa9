"""Drives the Chromium on PATH by its DevTools protocol: no code of others, nothing is downloaded."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

#: Of one command, and of what a page is waited for.
SECONDS = 40.0
_KEYS = {"Enter": "\r", "Escape": "", "ArrowDown": "", "ArrowUp": "", "ArrowRight": "", "ArrowLeft": ""}


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One tab; ``faults`` are the exceptions of its scripts and what its policy forbade."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.faults: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def command(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        done = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            return await done

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (done := self._waiting.pop(event.get("id", 0), None)) is not None and not done.done():
                if "error" in event:
                    done.set_exception(AssertionError(event["error"]["message"]))
                else:
                    done.set_result(event["result"])
            elif event.get("method") == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event.get("method") == "Audits.issueAdded" and "contentSecurityPolicyIssueDetails" in str(event):
                self.faults.append(json.dumps(event["params"])[:500])

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()

    async def goto(self, url: str) -> None:
        await self.command("Page.navigate", url=url)

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        return await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    async def until(self, expression: str, holds: Callable[[Any], object] = bool) -> Any:
        """Wait until the expression's value fits."""
        paced = f"new Promise((done) => setTimeout(() => done({expression}), 20))"
        async with asyncio.timeout(SECONDS):
            while not holds(value := await self.js(paced)):
                pass
        return value

    async def sees(self, words: str, selector: str = "body") -> None:
        """Wait until these words are there."""
        try:
            await self.until(
                f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(words)})"
            )
        except TimeoutError:
            raise AssertionError(f"no {words!r} in: {await self.text(selector)}") from None

    async def press(self, *keys: str) -> None:
        """Press them one after another; of Escape the dialog is closed before the next one."""
        for key in keys:
            text = _KEYS.get(key, key)
            fields = {"key": key, "windowsVirtualKeyCode": 27 if key == "Escape" else 0}
            down = {"text": text} if text else {}
            await self.command("Input.dispatchKeyEvent", type="keyDown", **fields, **down)
            await self.command("Input.dispatchKeyEvent", type="keyUp", **fields)
            if key == "Escape":
                await self.until("!document.querySelector('dialog[open]')")

    async def write(self, text: str) -> None:
        await self.command("Input.insertText", text=text)

    async def size(self, width: int, height: int) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def screenshot(self) -> bytes:
        """A PNG of what is seen."""
        answer = await self.command("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


class Browser:
    """A running Chromium, as if it had just been installed: what other profiles hold is not there."""

    def __init__(self, http: aiohttp.ClientSession, address: str, whole: Tab, profile: str) -> None:
        self._http = http
        self._tabs = address.partition("/devtools/")[0] + "/devtools/page"
        self._whole = whole
        self._profile = profile

    @asynccontextmanager
    async def tab(self, width: int = 1280, height: int = 860) -> AsyncIterator[Tab]:
        made = await self._whole.command("Target.createTarget", url="about:blank", browserContextId=self._profile)
        target = made["targetId"]
        tab = Tab(await self._http.ws_connect(f"{self._tabs}/{target}", max_msg_size=64 * 1024**2))
        try:
            for domain in ("Page", "Runtime", "Audits"):
                await tab.command(f"{domain}.enable")
            await tab.size(width, height)
            yield tab
        finally:
            await tab.close()
            await self._whole.command("Target.closeTarget", targetId=target)


@contextmanager
def running(folder: Path) -> Generator[str]:
    """Chromium without a window, which writes to ``folder``: the address of its DevTools."""
    program = chromium()
    assert program is not None
    options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run"]
    options += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        try:
            address = next(line.split()[-1] for line in process.stderr if "DevTools listening on" in line)
            late.cancel()
            draining = threading.Thread(target=process.stderr.read)
            draining.start()
            yield address
        finally:
            late.cancel()
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        draining.join(SECONDS)


@asynccontextmanager
async def browser(address: str) -> AsyncIterator[Browser]:
    """A profile of its own in the Chromium that is :func:`running` at ``address``."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as http:
        whole = Tab(await http.ws_connect(address))
        profile = (await whole.command("Target.createBrowserContext"))["browserContextId"]
        try:
            yield Browser(http, address, whole, profile)
        finally:
            await whole.command("Target.disposeBrowserContext", browserContextId=profile)
            await whole.close()
