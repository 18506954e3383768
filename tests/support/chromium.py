"""A page in Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))),
    None,
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        while (answer := await self._socket.receive_json(timeout=60)).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    async def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        """Open an address and wait until its page is drawn."""
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        await self.until(
            f"location.href.startsWith({url.partition('#')[0]!r}) && document.documentElement?.dataset.ready"
        )

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 60) -> Any:
        """Wait until a script's value is true; it."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.05)
        return value

    async def picture(self, *, whole: bool = False) -> bytes:
        """The page as a PNG, the whole of it or what is in view."""
        clip = await self.evaluate("({x: 0, y: 0, width: innerWidth, height: document.body.scrollHeight, scale: 1})")
        picture = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": clip} if whole else {})
        )
        return base64.b64decode(picture["data"])


@asynccontextmanager
async def browsing(home: Path) -> AsyncIterator[Page]:
    """A browser with one page, whose profile is in a folder."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port_file = home / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (port_file.exists() and len(port_file.read_text().split()) == 2):
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                address = next(each for each in await answer.json() if each["type"] == "page")["webSocketDebuggerUrl"]
            async with client.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.wait()
