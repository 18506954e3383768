"""``tandem watch``: a folder's runs on a live page. It reads the folder and changes nothing.

The page is the report's without data: it asks for them as JSON, and for each part of a run only when the run's files
have changed. All its addresses are relative, so that it works through tunnels and proxies.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path

from aiohttp import web

from tandem import doors, ports
from tandem.api.comparison import ComparedRuns
from tandem.cli import why
from tandem.errors import ConfigError
from tandem.observability import json_lines
from tandem.observability.board import CURVES
from tandem.observability.report import folder as folders
from tandem.observability.report import page, samples
from tandem.observability.report.folder import Row, RunFolder
from tandem.observability.report.summary import diagnosis, episodes, evaluations, summarise
from tandem.types import Json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SOME = 200
"""Steps of a run that are read for the list of runs and for comparisons."""
LOOPBACK = ("127.", "localhost", "::1")
KEY = "TANDEM_WATCH_KEY"
"""Environment variable of the key to ask for."""


class RunsPage:
    """The page and its data."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self._folder, self._key = folder, key
        self._reading = asyncio.Lock()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        for name, read in {
            "runs": self._runs, "run": self._run, "part": self._part, "step": self._step, "compare": self._compare,
        }.items():  # fmt: skip
            app.router.add_get(f"/{name}", self._answering(read))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what has not the key; without one, what a page of elsewhere asks through the browser."""
        if not self._key and (refusal := doors.from_a_page(request.method, request.headers, acts=False)):
            raise web.HTTPForbidden(text=refusal)
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if self._key and request.path != "/" and not hmac.compare_digest(key, self._key.encode()):
            raise web.HTTPUnauthorized(text="a key is needed: it is in the address that tandem watch printed")
        return await handler(request)

    async def _page(self, _: web.Request) -> web.StreamResponse:
        text = page.render("Runs", f"Runs in {self._folder}, live.", {"live": True})
        headers = {"Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'self'"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    def _answering(self, read: Callable[[web.Request], Json]) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            async with self._reading:
                body = await asyncio.to_thread(lambda: json_lines.encode(read(request)))
            response = web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})
            response.enable_compression()
            return response

        return answer

    def _names(self) -> list[str]:
        return [recipe.parent.name for recipe in self._folder.glob("*/config.yaml")]

    def _path(self, name: str) -> Path:
        if name not in self._names():
            raise web.HTTPNotFound(text=f"there is no run {name} in {self._folder}")
        return self._folder / name

    def _some(self, name: str) -> RunFolder:
        """A run of which not every step is read."""
        path = self._path(name)
        return _read_some(path, folders.state(path))

    def _whole(self, request: web.Request) -> RunFolder:
        """The run that is asked for, all of it."""
        path = self._path(request.query["name"])
        return _read_whole(path, folders.state(path))

    def _runs(self, _: web.Request) -> Row:
        """All runs, the newest first."""
        cards = [card(self._some(name)) for name in self._names()]
        return {
            "folder": str(self._folder),
            "runs": sorted(cards, key=lambda card: (card["summary"]["started"] or 0.0, card["name"]), reverse=True),
        }

    def _run(self, request: web.Request) -> Row:
        """What a run does now, and the state of the files that each part is read from."""
        run = self._whole(request)
        marks = dict(zip(folders.FILES, folders.state(run.path), strict=False))
        now = why.read(run.path, now=time.time(), events=run.events)
        return {
            "name": run.name,
            "diagnosis": diagnosis(run, summarise(run)),
            "marks": {part: [marks[file] for file in files] for part, (files, _) in page.PARTS.items()},
            "now": {
                "state": now.state,
                "headline": now.headline.removeprefix(f"{run.path}: "),
                "chain": [now.chain[0].owner, *(wait.on for wait in now.chain)] if now.chain else [],
                "waits": why.rows(now.waits),
                "ranks": [[f"rank {each.rank}", each.host, each.state, each.headline] for each in now.followers],
                "words": now.last,
            },
        }

    def _part(self, request: web.Request) -> Row:
        run, part = self._whole(request), request.query["part"]
        if part == "rollouts":  # each step's are asked for by themselves
            steps = [{"step": step} for step in run.rollout_steps]
            return {"rollouts": {"total": len(steps), "steps": steps}}
        return page.PARTS[part][1](run)

    def _step(self, request: web.Request) -> Row:
        return samples.of_step(self._whole(request), int(request.query["step"]))

    def _compare(self, request: web.Request) -> Row:
        runs = [self._some(name) for name in request.query.getall("compare")]
        compared, wanted = ComparedRuns(tuple(runs)), (*CURVES, *request.query.getall("metric", ()))
        return {
            "runs": [
                {
                    **card(run),
                    "series": page.columns(run, names=wanted),
                    "evaluations": evaluations(run),
                    "metrics": sorted(run.metrics[-1]["metrics"]) if run.metrics else [],
                }
                for run in runs
            ],
            "differences": compared.differences,
            "gains": compared.gains,
        }


@lru_cache(maxsize=256)
def _read_some(path: Path, state: folders.State) -> RunFolder:
    return folders.load(path, SOME)


@lru_cache(maxsize=2)
def _read_whole(path: Path, state: folders.State) -> RunFolder:
    return folders.load(path)


@lru_cache(maxsize=256)
def card(run: RunFolder) -> Row:
    """A run in the list."""
    summary = summarise(run)
    return {
        "name": run.name,
        "summary": summary,
        "diagnosis": diagnosis(run, summary),
        "alarms": sum(row["over"] is None for row in episodes(run)),
        "curve": page.columns(run, names=("reward",)),
    }


def watch(folder: Path, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        folder: of runs.
        host: address to listen at; of one that others reach, a key is asked for.
        port: 0 is a free one.
        tell: shows a line to the person.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the one that holds the runs' folders")
    local = host.startswith(LOOPBACK)
    key = os.environ.get(KEY) or ("" if local else secrets.token_urlsafe(16))
    port = port or ports.free_port()
    tell(f"runs of {folder}: {ports.http_url(host, port)}/{f'#key={key}' if key else ''}")
    tell(f"from elsewhere: ssh -L {port}:localhost:{port} HOST" if local else "whoever has this address may look")
    web.run_app(RunsPage(folder, key).application(), host=host, port=port, access_log=None, print=None)
