"""A child engine is watched, found again and ended with all it started; the servers here are a few lines of Python."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem.engines.vllm.client import process as _vllm_process
from tandem.engines.vllm.client.http import EngineServer, EngineUnreachable
from tandem.engines.vllm.client.process import EngineProcess, EngineRecord, environment, import_path
from tandem.errors import Deadline, EngineError
from tandem.ports import free_port
from tandem.processes import Identity, alive_after, family, identity, kill

pytestmark = pytest.mark.slow

SERVER = """
import http.server, os, signal, subprocess, sys, time
status, port, marks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass

def mark(name, pid):
    with open(f"{marks}/{name}.new", "w") as file: file.write(str(pid))
    os.rename(f"{marks}/{name}.new", f"{marks}/{name}")

sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
server = http.server.HTTPServer(("127.0.0.1", port), Answer)
"""
SERVE = "server.serve_forever()"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
HEIR = """
os.set_inheritable(server.fileno(), True)
mark("heir", subprocess.Popen([sys.executable, "-c", sleeper], close_fds=False).pid)
"""
CHILDREN = """
mark("same", subprocess.Popen([sys.executable, "-c", sleeper]).pid)
mark("group", subprocess.Popen([sys.executable, "-c", sleeper], process_group=0).pid)
mark("session", subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True).pid)
"""

Engines = Callable[..., EngineProcess]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Starts fake servers; whatever a test leaves of them is ended."""
    running: list[EngineProcess] = []

    def start(*code: str, port: int = 0, status: int = 200, grace: float = 10.0) -> EngineProcess:
        script = "\n".join(textwrap.dedent(part) for part in (SERVER, *code))
        command = [sys.executable, "-c", script, str(status), str(port), str(tmp_path)]
        monkeypatch.setattr(_vllm_process, "GRACE_SECONDS", grace)
        engine = EngineProcess.start(command, environment(os.environ), tmp_path / "engine.log")
        running.append(engine)
        return engine

    yield start
    monkeypatch.setattr(_vllm_process, "GRACE_SECONDS", 0.0)
    for engine in running:
        asyncio.run(engine.stop())


def marked(folder: Path, name: str) -> Identity:
    """The process whose pid a fake server wrote down."""
    until(lambda: (folder / name).exists())
    process = identity(int((folder / name).read_text()))
    assert process is not None
    return process


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def healthy(engine: EngineProcess, port: int, seconds: float = 60.0) -> None:
    asyncio.run(engine.wait_healthy(f"http://127.0.0.1:{port}", seconds))


def test_a_healthy_engine_is_waited_for_and_stopped(engines: Engines, tmp_path: Path) -> None:
    port = free_port()
    engine = engines("print('ready', flush=True)", SERVE, port=port)
    healthy(engine, port)
    assert engine.alive()
    assert engine.exit_reason() == "is running"
    assert engine.log_summary().endswith(":\n  ready")
    assert stat.S_IMODE((tmp_path / "engine.log").stat().st_mode) == 0o600
    asyncio.run(engine.stop())
    asyncio.run(engine.stop())
    assert not engine.alive()
    assert engine.exit_reason() == "was killed by SIGTERM"


def test_an_engine_that_dies_tells_why(engines: Engines) -> None:
    noise = """
    print("WARNING 1-1 beware of OSError: 24", "ValueError: no such model", sep="\\n")
    print(*[f"line {i}" for i in range(50)], sep="\\n")
    sys.exit(3)
    """
    with pytest.raises(EngineError) as error:
        healthy(engines(noise), free_port())
    message = str(error.value)
    assert "ended with exit code 3 before it was healthy" in message
    assert "its first error was:\n  ValueError: no such model" in message
    assert message.endswith("  line 49")


def test_a_dead_engine_is_not_taken_for_the_stranger_on_its_port(engines: Engines) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as stranger:
        thread = threading.Thread(target=stranger.serve_forever)
        thread.start()
        try:
            engine = engines(port=stranger.server_port)  # it cannot have that port
            until(lambda: not engine.alive())
            with pytest.raises(EngineError, match="Address already in use"):
                healthy(engine, stranger.server_port)
        finally:
            stranger.shutdown()
            thread.join()


def test_only_this_engines_lines_are_shown(engines: Engines, tmp_path: Path) -> None:
    first = engines("print('of the first'); sys.exit(1)")
    until(lambda: not first.alive())
    second = engines("sys.exit(1)")
    until(lambda: not second.alive())
    assert first.log_summary().endswith(":\n  of the first")
    with pytest.raises(EngineError, match="printed nothing to"):
        healthy(second, free_port())


def test_an_engine_that_is_killed_says_by_what(engines: Engines) -> None:
    engine = engines(SERVE)
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not engine.alive())
    assert engine.exit_reason().startswith("was killed by SIGKILL; if nobody did that, the machine ran out of memory")


@pytest.mark.parametrize(("status", "seen"), [(503, "503"), (0, "Cannot connect")])
def test_an_engine_that_is_never_healthy_is_a_deadline(engines: Engines, status: int, seen: str) -> None:
    port = free_port()
    engine = engines(SERVE, port=port if status else 0, status=status)
    with pytest.raises(Deadline, match=f"pid {engine.pid}.* not healthy after 1.5 s.*{seen}"):
        healthy(engine, port, 1.5)
    assert engine.alive()


def test_an_engine_that_ignores_sigterm_is_killed(engines: Engines) -> None:
    port = free_port()
    engine = engines(STUBBORN, SERVE, port=port, grace=0.3)
    healthy(engine, port)
    asyncio.run(engine.stop())
    assert engine.exit_reason().startswith("was killed by SIGKILL")


def test_a_stop_that_is_interrupted_still_kills(engines: Engines) -> None:
    port = free_port()
    engine = engines(STUBBORN, SERVE, port=port, grace=600.0)
    healthy(engine, port)

    async def interrupted() -> None:
        async with asyncio.timeout(0.3):
            await engine.stop()

    with pytest.raises(TimeoutError):
        asyncio.run(interrupted())
    until(lambda: not engine.alive())


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "after it was killed"])
def test_nothing_that_the_engine_started_outlives_it(
    engines: Engines, tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_vllm_process, "_STRAGGLER_SECONDS", 0.3)
    port = free_port()
    engine = engines(CHILDREN, SERVE, port=port)
    healthy(engine, port)
    started = [marked(tmp_path, name) for name in ("same", "group", "session")]
    engine.record("", "")
    if killed:
        os.kill(engine.pid, signal.SIGKILL)
        until(lambda: not engine.alive())
    assert all(alive_after(*one) for one in started)
    asyncio.run(engine.stop())
    assert not any(alive_after(*one) for one in started)


def test_a_call_ends_with_the_engine_although_a_child_of_it_holds_its_socket(engines: Engines, tmp_path: Path) -> None:
    port = free_port()
    slow = "Answer.do_POST = lambda self: time.sleep(600)"
    engine = engines(HEIR, slow, SERVE, port=port)
    healthy(engine, port)
    marked(tmp_path, "heir")
    server = EngineServer(f"http://127.0.0.1:{port}", "", control_seconds=600.0, request_seconds=600.0)
    server.process = engine

    async def scene() -> None:
        calls = [asyncio.create_task(server.post(path)) for path in ("/bridge/pause", "/nccl/start_receiver")]
        await asyncio.sleep(0.5)  # both wait for their answer
        os.kill(engine.pid, signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*calls, server.get("/health", dict), return_exceptions=True), 30)
        assert all(isinstance(error, EngineUnreachable) and "SIGKILL" in str(error) for error in errors)
        with pytest.raises(EngineUnreachable, match="SIGKILL"):  # and none begins to wait
            await asyncio.wait_for(server.post("/bridge/pause"), 30)
        await server.close()

    asyncio.run(scene())


def test_a_child_of_the_session_is_found_without_its_parent(engines: Engines, tmp_path: Path) -> None:
    engine = engines(CHILDREN)  # and ends at once
    same, group, session = (marked(tmp_path, name) for name in ("same", "group", "session"))
    me = engine._identity
    until(lambda: not engine.alive())
    assert family(me) == {same, group}
    assert family(me, [session]) == {same, group, session}, "nothing but having been seen tells whose it is"
    kill([session])


def test_a_later_trainer_finds_the_engine_again(engines: Engines, tmp_path: Path) -> None:
    port = free_port()
    first = engines("print('ready', flush=True)", CHILDREN, SERVE, port=port)
    healthy(first, port)
    marked(tmp_path, "session")
    path = tmp_path / "run" / "engine.json"
    first.record("http://127.0.0.1:1", "secret").write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["engine.json"]

    record = EngineRecord.read(path)
    assert record is not None
    assert (record.url, record.key, len(record.family)) == ("http://127.0.0.1:1", "secret", 3)
    again = EngineProcess.reattach(record)
    assert again is not None
    healthy(again, port)
    assert (again.pid, again.exit_reason()) == (first.pid, "is running")
    assert again.log_summary().endswith(":\n  ready")
    asyncio.run(again.stop())
    assert not again.alive()
    assert not first.alive()
    assert not any(alive_after(*one) for one in record.family)
    assert again.exit_reason() == "ended (how is unknown: another process started it)"
    assert EngineProcess.reattach(record) is None


def test_what_a_dead_engine_left_behind_is_ended(engines: Engines, tmp_path: Path) -> None:
    port = free_port()
    engine = engines(CHILDREN, SERVE, port=port)
    healthy(engine, port)
    left = marked(tmp_path, "session")
    record = engine.record("", "")
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not engine.alive())
    assert EngineProcess.reattach(record) is None
    until(lambda: not alive_after(*left))


def test_a_reused_pid_is_a_stranger(engines: Engines) -> None:
    """The record's pid is alive, but started at another time: neither it nor its session is touched."""
    stranger = engines(SERVE)
    me = identity(stranger.pid)
    assert me is not None
    other = f"{int(me.started.split()[0]) - 1} {me.started.split()[1]}"
    record = EngineRecord(pid=me.pid, started=other, url="", key="", log="", family=((me.pid, other),))  # type: ignore[arg-type]
    assert EngineProcess.reattach(record) is None
    assert not alive_after(me.pid, other)
    assert not family(Identity(me.pid, other), [Identity(me.pid, other)])
    kill([Identity(me.pid, other)])
    time.sleep(0.1)
    assert stranger.alive()
    assert family(me) == {me}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', '{"pid": 1, "family": [3]}'])
def test_a_file_that_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "engine.json").write_text(text)
    assert EngineRecord.read(tmp_path / "engine.json") is None
    assert EngineRecord.read(tmp_path / "none.json") is None


def test_the_environment_is_the_engines_own() -> None:
    base = {
        "HOME": "/h", "PATH": "/bin", "PYTHONPATH": "/x", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/x",
        "OMP_NUM_THREADS": "1", "RANK": "1", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    env = environment(base, python="/venv/bin/python", PYTHONPATH="/y", HOME=None, VLLM_API_KEY="k")
    assert env == {
        "PATH": "/venv/bin:/bin", "PYTHONPATH": "/y", "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "k",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    assert environment(base, python="python3")["PATH"] == "/bin"
    assert environment({})["DO_NOT_TRACK"] == "1"


def test_the_import_path_holds_this_package_and_a_plugin_alone(tmp_path: Path) -> None:
    folder = import_path(tmp_path / "a" / "b")
    assert sorted(entry.name for entry in folder.iterdir()) == ["tandem", "tandem_engine-0.dist-info"]
    assert import_path(folder) == folder
    code = "import sys, tandem.errors; print(tandem.__file__); print(*[p for p in sys.path if 'site-packages' in p])"
    env = environment(os.environ, PYTHONPATH=str(folder))
    out = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == [str(folder / "tandem" / "__init__.py"), ""]

    code = (
        "from importlib.metadata import entry_points;"
        "(plugin,) = entry_points(group='vllm.general_plugins'); print(plugin.load().__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "fork_workers"

    (folder / "tandem").unlink()
    (folder / "tandem").symlink_to(tmp_path / "of an older checkout")
    assert (import_path(folder) / "tandem" / "errors.py").exists()
