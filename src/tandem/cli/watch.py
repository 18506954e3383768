"""``tandem watch``: a folder's runs on a page that moves, for browsers of this machine alone; it changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from aiohttp import web

from tandem import doors
from tandem.errors import ConfigError
from tandem.observability import vitals
from tandem.observability.report import overview

SECONDS = 5
"""Between two looks of an open page."""
_READ = ("config.yaml", "metrics.jsonl", "events.jsonl", "eval.jsonl")


class RunsPage:
    """The page of all runs, and a page for each; a run whose files are as they were is not read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_of_this_machine])
        app.add_routes([web.get("/", self._all), web.get("/run/{name}", self._one)])
        return app

    def _runs(self) -> list[Path]:
        return sorted(recipe.parent for recipe in self._folder.glob("*/config.yaml"))

    def _card(self, run: Path) -> tuple[float, str]:
        times = [(run / name).stat().st_mtime_ns for name in _READ if (run / name).exists()]
        return _read_card(run, vitals.process(run), *times)

    async def _all(self, request: web.Request) -> web.Response:
        cards = await asyncio.to_thread(lambda: sorted(map(self._card, self._runs()), reverse=True))
        return _page(overview.runs_page(self._folder, [text for _, text in cards]), moves=True)

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        run = next((run for run in self._runs() if run.name == name), None)
        if run is None:
            raise web.HTTPNotFound(text=f"there is no run {name} in {self._folder}")
        return _page(await asyncio.to_thread(overview.run_page, run), moves=vitals.process(run) == "alive")


@lru_cache(maxsize=256)
def _read_card(run: Path, *state: object) -> tuple[float, str]:
    return overview.card(run)


def _page(text: str, *, moves: bool) -> web.Response:
    headers = {"Cache-Control": "no-store"} | ({"Refresh": str(SECONDS)} if moves else {})
    return web.Response(text=text, content_type="text/html", headers=headers)


@web.middleware
async def _of_this_machine(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    """Refuse what a page of elsewhere asks through the browser."""
    if why := doors.from_a_page(request.method, request.headers, acts=False):
        raise web.HTTPForbidden(text=why)
    return await handler(request)  # type: ignore[no-any-return]


def watch(folder: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        folder: of runs.
        port: 0 is a free one.
        tell: shows a line to the person.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the one that holds the runs' folders")
    tell(f"runs of {folder}; from elsewhere: ssh -L PORT:localhost:PORT HOST")
    web.run_app(RunsPage(folder).application(), host="127.0.0.1", port=port, access_log=None, print=tell)
