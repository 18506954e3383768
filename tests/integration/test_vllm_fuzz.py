"""Bodies that nobody would send, to a real engine: no 500, nothing hangs, it does not die, and its memory stays flat.

A real engine beside the fake of the unit tests, for what no fake has: vLLM's own routes, its scheduler and its workers.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import HEAD_DIM, alive, engine, needs_engine, recipe, serving
from support import odd_requests as odd

from tandem.ports import free_port

pytestmark = [needs_engine, pytest.mark.long]

REQUESTS = 1000
"""Of each kind; on two cores they take four minutes."""
PATIENCE = 60.0
"""Seconds for one request; on a free machine none takes 5."""
GROWTH = 400
"""MiB by which an engine may grow: caches fill, and what its libraries compile stays."""


@dataclass
class Engine:
    """A keyless engine on loopback, in a process group of its own."""

    port: int
    model: str
    process: subprocess.Popen[str]
    log: Path

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """One call; status and body."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            way.request("GET" if body is None else "POST", path, raw, {"Content-Type": "application/json"})
            answer = way.getresponse()
            return answer.status, answer.read()
        finally:
            way.close()

    def odd(self, draw: random.Random, valid: list[tuple[str, Any]]) -> None:
        """One odd request."""
        path, raw = odd.request(draw, valid)
        controls = odd.controls(path)
        if controls and draw.random() < 0.5:
            assert self.ask("/bridge/pause", {"seconds": 60})[0] == 200
        status, response = self.ask(path, raw)
        assert status < 500, (path, raw[:1000], response[:1000])
        if controls:
            self.restore((path, raw[:1000]))

    def restore(self, after: Any) -> None:
        """Have it serve again."""
        for path, body in odd.RESTORE:
            status, response = self.ask(path, body)
            assert status == 200, (after, path, response)

    def family(self) -> list[int]:
        """Its processes, the verb that started it among them."""
        return _family(self.process.pid)

    def resident(self) -> int:
        """MiB that they hold, shared ones counted each time."""
        rows = [Path(f"/proc/{pid}/status").read_text() for pid in self.family() if alive(pid)]
        return sum(int(row.partition("VmRSS:")[2].split()[0]) for row in rows if "VmRSS:" in row) >> 10


def _family(pid: int) -> list[int]:
    try:
        tasks = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it ended in this moment
        return []
    return [pid, *(other for children in tasks for child in children for other in _family(int(child)))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place, port = tmp_path_factory.mktemp("fuzz"), free_port()
    model = build_tiny_model(place / "model", head_dim=HEAD_DIM)
    own = {"engine": engine(port=port, max_num_seqs=16), "sync": {"kind": "shared"}, "context": 256}
    options = recipe(model, place / "runs", trainable={"kind": "lora", "rank": 8}, rewards={"number": 1.0}, **own)
    (place / "recipe.yaml").write_text(yaml.safe_dump(options))
    with serving(place) as process:
        yield Engine(port, str(model), process, place / "said.txt")


def test_odd_requests_leave_an_engine_as_it_was(served: Engine) -> None:
    valid = odd.OURS
    before = json.loads(served.ask("/health")[1])["engine"]
    for path, body in valid:  # what is compiled and cached once is there afterwards
        served.ask(path, body)
        served.restore(path)
    first, draw = served.resident(), random.Random(7)
    for _ in range(REQUESTS):
        served.odd(draw, valid)
    assert served.resident() < first + GROWTH
    status, response = served.ask("/generate", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert (status, len(json.loads(response)["token_ids"][0])) == (200, 2)
    health = json.loads(served.ask("/health")[1])
    assert (health["engine"], health["state"], health["running"], health["waiting"]) == (before, "serving", 0, 0)


def test_a_page_in_a_browser_does_not_pause_it(served: Engine) -> None:
    for headers in (
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Host": "evil.example", "Content-Type": "application/json"},
    ):
        way = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
        way.request("POST", "/bridge/pause", b"{}", headers)
        assert way.getresponse().status == 403
        way.close()
    assert json.loads(served.ask("/health")[1])["state"] == "serving"
