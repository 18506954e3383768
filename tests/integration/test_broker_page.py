"""The broker's live page in a real browser: it shows what is, follows it, and runs nobody else's script."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from support.brokers import Client, group, play

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))),
    None,
)
HOSTILE = "<img src=x onerror=document.title='hacked'>"
ALONE = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
QUIET = ("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")


async def opened(url: str, home: Path, seconds: int) -> tuple[str, str]:
    """The page's elements after its script ran for so long, and what the browser says of it."""
    where = (f"--user-data-dir={home / 'profile'}", f"--virtual-time-budget={1000 * seconds}", "--dump-dom")
    browser = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *ALONE, *QUIET, *where, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    drawn, stderr = await asyncio.wait_for(browser.communicate(), 100)
    console = "\n".join(line for line in stderr.decode().splitlines() if "CONSOLE" in line)
    return re.sub(r"<script>.*?</script>", "", drawn.decode(), flags=re.DOTALL), console


def texts(drawn: str) -> str:
    """What a person reads."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", drawn))


def test_what_the_page_shows(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        await client.begin(batch_size=8, num_steps=7)
        names = ("maths", HOSTILE)
        first, second = [await client.env(desired_name=name, min_batch_allocation=0.25) for name in names]
        for env in (first, first, second):
            await client.post("/scored_data", group(env_id=env))
        await client.post("/scored_data", "{bad")
        assert (await client.get("/batch?lease=60&policy=3")).json["batch"]
        drawn, console = await opened(client.url, tmp_path, 5)
        shown = texts(drawn)
        assert console == "", "no script failed, and nothing was refused by the page's policy"
        assert "has 0 of the 2 sequences its share asks for." in shown
        assert "step queued buffered leased served trained dropped refused held MiB 3 1 0 2 2 0 0 1 0.0" in shown
        assert "maths_0 connected 1 0 2 1 0.25" in shown
        assert "<img" not in drawn
        assert "&lt;img" in drawn
        assert "<title>Tandem broker" in drawn

    play(scene)


def test_before_anything_happened(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        drawn, console = await opened(client.url, tmp_path, 2)
        assert console == ""
        assert "wait for a trainer to register" in texts(drawn)

    play(scene)
