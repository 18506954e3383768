"""``tandem serve broker`` as a process: it says where it is, and what it accepted survives kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.brokers import ENV, RUN, group


@contextmanager
def broker(*options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and what it said until it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", *options, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    output: list[str] = []
    try:
        for line in process.stdout:
            output.append(line)
            if "Ctrl-C ends it" in line:
                break
        match = re.search(r"http://\S+:\d+", "".join(output))
        assert match, output
        yield process, match[0], output
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def call(url: str, path: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def test_what_was_accepted_survives_kill_9(tmp_path: Path) -> None:
    with broker("serve", "broker", "--data", str(tmp_path)) as (process, url, output):
        assert str(tmp_path) in "".join(output)
        call(url, "/register", RUN)
        call(url, "/batch")
        assert call(url, "/register-env", ENV)["env_id"] == 0
        for scores in ([1, 2, 3, 4], [5, 6, 7, 8]):
            assert call(url, "/scored_data", group(scores=scores, env_id=0)) == {"status": "received"}
        process.send_signal(signal.SIGKILL)
        process.wait()
    with broker("run-api", "--data", str(tmp_path)) as (process, url, output):
        assert "2 groups" in "".join(output)
        assert call(url, "/info")["batch_size"] == 8
        assert [one["scores"] for one in call(url, "/batch")["batch"]] == [[1, 2, 3, 4], [5, 6, 7, 8]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_what_is_no_http_is_answered_and_leaves_no_trace_in_the_terminal() -> None:
    with broker("run-api") as (process, url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Bad: \x00\r\n\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.0 400")
        assert call(url, "/status") == {"current_step": 0, "queue_size": 0}
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert rest.split() == ["ended"]
