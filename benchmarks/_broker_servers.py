"""The two brokers of the benchmark as processes, what is said to them beforehand, and their memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ATROPOS = ROOT / ".venv-atropos/bin/run-api"
SEQUENCES, TOKENS = 8, 1024
"""Of a group."""
PROMPT = 128
"""Tokens of each sequence that are masked."""


class Server:
    """One broker, running while the block does."""

    def __init__(self, name: str, options: list[str]):
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="broker-"))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address: tuple[str, int] = listener.getsockname()
        port = ["--host", "127.0.0.1", "--port", str(self.address[1])]
        command = [str(ATROPOS), *port]
        if name == "tandem":
            data = ["--data", str(self.folder / "data"), *options]
            command = [sys.executable, "-m", "tandem", "serve", "broker", *port, *data]
        self.log = self.folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=self.folder)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.ask("/info")
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise RuntimeError(f"{self.name} did not start: {self.log_tail()}") from None
                time.sleep(0.05)

    def __exit__(self, *_: Any) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode not in (0, -signal.SIGTERM):
            print(f"{self.name} ended with {self.process.returncode}: {self.log_tail()}", file=sys.stderr)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def ask(self, path: str, body: Any = None, seconds: float = 60.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{self.address[0]}:{self.address[1]}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.name} answers {path} with {error.code}: {error.read()[:300]!r}") from None

    def start_run(self, batch_size: int, environments: int = 1) -> list[int]:
        """Register a trainer and environments of groups of ``SEQUENCES``; their ids."""
        run = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": 100}
        steps = {"batch_size": batch_size, "max_token_len": 4096, "starting_step": 0, "num_steps": 10**6}
        self.ask("/register", {**run, **steps})
        self.ask("/batch")
        env = {"max_token_length": 4096, "desired_name": "env", "weight": 1.0, "group_size": SEQUENCES}
        return [int(self.ask("/register-env", env)["env_id"]) for _ in range(environments)]

    def memory(self) -> float:
        """Megabytes of RAM of the process."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def cpu(self) -> float:
        """Seconds of a core that the process has used, all its threads together."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def stored(self) -> float:
        """Megabytes on disk."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files if path != self.log) / 2**20


def group(env_id: int | None, seed: int, *, sequences: int = SEQUENCES, tokens: int = TOKENS) -> dict[str, Any]:
    """A scored group as BaseEnv sends it, with logprobs as vLLM's floats are."""
    dice = random.Random(seed)
    rows = [[dice.randrange(150_000) for _ in range(tokens)] for _ in range(sequences)]
    prompt = min(PROMPT, tokens // 2)
    return {
        "tokens": rows,
        "masks": [[-100] * prompt + row[prompt:] for row in rows],
        "scores": [dice.random() for _ in rows],
        "inference_logprobs": [[1.0] * prompt + [-dice.expovariate(1.0) for _ in row[prompt:]] for row in rows],
        "env_id": env_id,
        **dict.fromkeys(("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")),
    }


@dataclass(frozen=True)
class Lane:
    """How messages are written."""

    name: str
    gzipped: bool = False

    def post(self, path: str, body: Any) -> bytes:
        """A whole request."""
        data = json.dumps(body).encode()  # with its spaces, as BaseEnv writes it
        more = "Content-Encoding: gzip\r\n" if self.gzipped else ""
        data = gzip.compress(data) if self.gzipped else data
        head = f"POST {path} HTTP/1.1\r\nHost: broker\r\nContent-Type: application/json\r\n{more}"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def get(self, path: str) -> bytes:
        """A whole request; ``gzipped`` asks for a compressed answer, as the ``requests`` library does."""
        more = "Accept-Encoding: gzip, deflate\r\n" if self.gzipped else ""
        return f"GET {path} HTTP/1.1\r\nHost: broker\r\nAccept: application/json\r\n{more}\r\n".encode()


def status_request(env_id: int) -> bytes:
    """``GET /status-env`` with its body."""
    body = json.dumps({"env_id": env_id}).encode()
    head = "GET /status-env HTTP/1.1\r\nHost: broker\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


JSON, GZIP = Lane("JSON"), Lane("JSON, gzip", gzipped=True)
