"""What the tests with real atroposlib share: its processes and ours, an engine that invents its answers, and books.

Atropos' library has an environment of its own, ``.venv-atropos`` or what TANDEM_ATROPOS_PYTHON names.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem.ports import free_port

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
START = 180.0
"""Seconds within which a process of Atropos' must be ready; its imports take several."""


def atropos_python() -> Path:
    """The interpreter that has atroposlib."""
    return _python("atropos")


def verifiers_python(version: str = "") -> Path:
    """The interpreter that has verifiers 0.1, and OpenAI's and Anthropic's clients; or with ``-04`` that has 0.4."""
    return _python(f"verifiers{version}")


def packages_python() -> Path:
    """The interpreter that has gymnasium, TextArena, OpenEnv, MCP and agents' SDKs."""
    return _python("packages")


def _python(peer: str) -> Path:
    variable = f"TANDEM_{peer.upper().replace('-', '_')}_PYTHON"
    path = Path(os.environ.get(variable) or REPOSITORY / f".venv-{peer}/bin/python")
    if not path.exists():
        pytest.fail(f"{path} is missing: make it by: bash scripts/setup {peer}", pytrace=False)
    return path


def until(true: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """What ``true`` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := true():
            return result
        time.sleep(0.02)
    pytest.fail(f"waited {seconds} seconds for {what}", pytrace=False)


def ask(url: str, body: Any = None, *, method: str | None = None, seconds: float = 10.0) -> Any:
    """The answer of one HTTP call, which must succeed."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.load(response)


def key_of(group: Any) -> str:
    """As ``peer_env.key_of``."""
    fields = [
        group.get(name) or None for name in ("tokens", "masks", "scores", "inference_logprobs", "group_overrides")
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# Processes


class Process:
    """A child, and what it says."""

    def __init__(self, command: list[str], log: Path, *, close_fds: bool = True):
        self.log = log
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent, close_fds=close_fds
            )
        self.pid = self.child.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.child.poll()

    def kill(self) -> None:
        """As ``kill -9`` does."""
        if self.status() is None:
            os.kill(self.pid, signal.SIGKILL)
        until(lambda: self.status() is not None, "the end of a process", 10)

    def end(self) -> None:
        """Ask it to end, and make it."""
        if self.status() is None:
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(pytest.fail.Exception):
                until(lambda: self.status() is not None, "the end of a process", 10)
        self.kill()


class Peers(contextlib.ExitStack):
    """Starts processes in a folder; they end with the block."""

    def __init__(self, place: Path, model: Path):
        super().__init__()
        self.place, self.model = place, model
        self._number = itertools.count()

    def start(self, name: str, *command: str | Path, listener: socket.socket | None = None) -> Process:
        """A process of Tandem's; one that is given a listening socket finds it as systemd's are found."""
        words = [sys.executable, "-m", "tandem", *map(str, command)]
        if listener is not None:
            listener.set_inheritable(True)
            words = ["bash", "-c", f'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@" 3<&{listener.fileno()}', "bash", *words]
        process = Process(words, self._log(name), close_fds=listener is None)
        self.callback(process.end)
        return process

    def peer(self, role: str, *argv: str | Path) -> Process:
        """A process of Atropos'."""
        program = ["-m", "atroposlib.cli.run_api"] if role == "run-api" else [str(HERE / f"{role}.py")]
        process = Process([str(atropos_python()), *program, *map(str, argv)], self._log(role))
        self.callback(process.end)
        return process

    def _log(self, name: str) -> Path:
        return self.place / f"{name}-{next(self._number)}.log"

    def run_api(self) -> Broker:
        """Atropos' own broker."""
        return Broker(lambda host, port: self.peer("run-api", "--host", host, "--port", port))

    def tandem_broker(self, *, held: bool = False) -> Broker:
        """Ours, with its ledger in a folder that a second start finds again.

        Args:
            held: keep its socket open while it is away, as systemd does: who connects then waits.
        """
        data = ("serve", "broker", "--data", self.place / "broker")
        if not held:
            return Broker(lambda host, port: self.start("broker", *data, "--host", host, "--port", port))
        listener = self.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        return Broker(lambda *_: self.start("broker", *data, listener=listener), listener.getsockname()[1])

    def environment(self, broker: Broker, engine: str, style: str, group_size: int, **options: Any) -> Environment:
        """A BaseEnv, by its own command ``serve``."""
        record = self.place / f"{style}-{next(self._number)}.jsonl"
        settings = {
            "rollout_server_url": broker.url,
            "tokenizer_name": self.model,
            "use_wandb": False,
            "wandb_name": style,
            "group_size": group_size,
            "style": style,
            "record": record,
            "max_token_length": 512,
            "ensure_scores_are_not_same": False,
            **options,
        }
        flags = [word for name, value in settings.items() for word in (f"--env.{name}", str(value))]
        served = ("--openai.base_url", f"{engine}/v1", "--openai.model_name", str(self.model))
        return Environment(self.peer("peer_env", "serve", *flags, *served), record, group_size)


class Broker:
    """A broker's process; it can be killed and started again at the same address."""

    def __init__(self, begin: Callable[[str, str], Process], port: int = 0):
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._begin = lambda: begin("127.0.0.1", str(port))
        self.start()

    def start(self) -> float:
        """Start it, and the seconds until it answered."""
        began = time.monotonic()
        self.process = self._begin()
        until(self.answers, f"the broker at {self.url}", START)
        return time.monotonic() - began

    def answers(self) -> bool:
        assert self.process.status() is None, self.process.output
        try:
            ask(f"{self.url}/info", seconds=1.0)
        except OSError:
            return False
        return True


# Books


@dataclass
class Environment:
    """A BaseEnv's process, and what it sent."""

    process: Process
    record: Path
    group_size: int

    def sent(self) -> set[str]:
        """Keys of groups whose sending began."""
        return {key for line in lines(self.record) for key in line.get("sent", ())}

    def accepted(self) -> Counter[str]:
        """How often the environment was told that it was accepted, of each group by its key."""
        responses = (line for line in lines(self.record) if line.get("status") == 200)
        return Counter(key for line in responses for key in line["answered"])

    def answers(self) -> set[tuple[int, ...]]:
        """Trained tokens of each sequence that it sent."""
        return {tuple(answer) for line in lines(self.record) for answer in line.get("answers", ())}

    def unanswered(self) -> set[str]:
        """Keys of groups that it tried to send without being told what came of it."""
        tries = Counter(key for line in lines(self.record) for key in line.get("sent", ()))
        answered = Counter(key for line in lines(self.record) for key in line.get("answered", ()))
        return set(tries - answered)

    def refused(self) -> list[dict[str, Any]]:
        return [line for line in lines(self.record) if line.get("status", 200) != 200]


@dataclass
class Trainer:
    """Takes batches as a trainer of Atropos' does, by plain ``GET /batch``, and keeps all of them."""

    url: str
    batch_size: int
    batches: list[list[dict[str, Any]]] = field(default_factory=list)

    def register(self, **changes: Any) -> Trainer:
        body = {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": self.batch_size,
            "max_token_len": 512,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 100,
            "starting_step": 0,
            "num_steps": 10_000,
            **changes,
        }
        assert "uuid" in ask(f"{self.url}/register", body)
        return self

    def take(self) -> bool:
        """One poll; whether there was a batch."""
        batch = ask(f"{self.url}/batch")["batch"]
        if batch is not None:
            self.batches.append(batch)
        return batch is not None

    def take_all(self) -> None:
        while self.take():
            pass

    def served(self) -> Counter[str]:
        return Counter(key_of(group) for batch in self.batches for group in batch)


# An engine


PROMPTS = "prompt_token_ids"


@contextlib.contextmanager
def fake_engine(model: Path) -> Iterator[str]:
    """URL of an engine that answers at once with random bytes, as PROTOCOL's "vllm" server type wants them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    letters = tokenizer.encode("0123456789abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
    dice = random.Random(0)

    def sampled(number: int) -> list[int]:
        return [*dice.choices(letters, k=number - 1), tokenizer.eos_token_id]

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = prompt[PROMPTS] if isinstance(prompt, dict) else tokenizer.encode(prompt)
        answers = [sampled(body.get("max_tokens", 16)) for _ in range(body.get("n", 1))]
        logprobs = [[[{str(token): -dice.random()}] for token in answer] for answer in answers]
        response = {
            "text": [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers],
            "prompt": tokenizer.decode(ids),
            "finish_reasons": ["stop"] * len(answers),
            "token_ids": answers,
            PROMPTS: ids,
            "logprobs": logprobs,
            "versions": [[[0, len(answer)]] for answer in answers],
            "engine": "fake",
        }
        return web.json_response(response)

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        texts = [
            tokenizer.decode(sampled(body.get("max_tokens", 16)), skip_special_tokens=True)
            for _ in range(body.get("n", 1))
        ]
        choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(texts)]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "x", "object": "text_completion", "created": 0, "model": body["model"]}
        return web.json_response({**about, "choices": choices, "usage": usage})

    async def well(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": str(model), "max_model_len": 512}]})

    app = web.Application()
    app.add_routes([web.get("/health", well), web.get("/v1/models", models)])
    app.add_routes([web.post("/generate", generate), web.post("/v1/completions", complete)])
    with served(app) as url:
        yield url


@contextlib.contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Serve an application from a thread of its own; its URL."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    port = free_port()

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
