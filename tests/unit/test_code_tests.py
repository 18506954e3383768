"""Programs that nobody has read are tested, and reach nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile_programs import HOSTILE

from tandem.errors import RewardError
from tandem.rewards import code_tests
from tandem.rewards.code_tests import CodeTests, Sandbox, read_tests
from tandem.rollout.gold import gold_rollout
from tandem.types import Message, Task

DOUBLE = "print(2 * int(input()))"
IN_OUT = [{"input": "1", "output": "2"}, {"input": "4\n", "output": "8\n"}]
DEFINED = "def double(n):\n    return 2 * n"
ASSERTS = ["assert double(2) == 4", "assert double(3) == 6"]


def score(reply: str, tests: Any, **options: Any) -> float:
    task = Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer="", meta={"tests": tests})
    return CodeTests(**options)(gold_rollout(task, reply))


@pytest.mark.parametrize(
    ("reply", "tests", "all_pass", "share"),
    [
        (DOUBLE, IN_OUT, 1.0, 1.0),
        (f"So:\n```python\nno\n```\nbetter:\n```py\n{DOUBLE}\n```\nDone.", IN_OUT, 1.0, 1.0),
        ("print(int(input()) + 1)", IN_OUT, 0.0, 0.5),
        ("print(2", IN_OUT, 0.0, 0.0),
        (DOUBLE, {"inputs": ["1", "2"], "outputs": ["2", "4"]}, 1.0, 1.0),
        (DOUBLE, '[{"input": "1", "output": "2"}]', 1.0, 1.0),
        (DEFINED, ASSERTS, 1.0, 1.0),
        (DEFINED, "\n".join(ASSERTS), 1.0, 1.0),
        ("def double(n):\n    return n + 2", ASSERTS, 0.0, 0.5),
        (f"{DEFINED}\nif __name__ == '__main__':\n    input()", ASSERTS, 1.0, 1.0),
        ("import sys\nsys.exit(0)", ASSERTS, 0.0, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0, 0.0),
        ("print(2)\nraise ValueError", [{"input": "", "output": "2"}], 0.0, 0.0),
        ("import threading\nthreading.Timer(0.1, print, ['4']).start()", {"input": "", "output": "4"}, 1.0, 1.0),
        ("import numpy", IN_OUT, 0.0, 0.0),
        ("", IN_OUT, 0.0, 0.0),
    ],
)  # fmt: skip
def test_programs_are_scored(reply: str, tests: Any, all_pass: float, share: float) -> None:
    assert score(reply, tests) == all_pass
    assert score(reply, tests, count="share") == share


def test_time_and_memory_are_bounded_for_a_test_and_for_all() -> None:
    before = time.monotonic()
    assert score("while True: pass", IN_OUT * 50, count="share", test_seconds=0.3, seconds=0.6) == 0.0
    assert time.monotonic() - before < 10
    assert score("x = bytearray(200 << 20)\nprint(2)", [{"input": "", "output": "2"}], memory_mb=128) == 0.0
    assert score("x = bytearray(200 << 20)\nprint(2)", [{"input": "", "output": "2"}]) == 1.0


def test_what_is_no_test_is_refused() -> None:
    with pytest.raises(ValueError, match="expected asserts, or input and output"):
        list(read_tests({"fn_name": "f", "inputs": [], "outputs": []}))
    with pytest.raises(ValueError, match="has no test in its column"):
        score(DOUBLE, [])


def test_a_kernel_without_namespaces_is_told_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests._sandbox(), "isolated", False)
    with pytest.raises(RewardError, match="gives this user no namespaces"):
        CodeTests().prepare()
    CodeTests(isolated=False).prepare()


@pytest.fixture(scope="module")
def sandbox(victim: dict[str, Any]) -> Iterator[Sandbox]:
    sandbox = Sandbox()
    assert sandbox.isolated
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a program could reach: a file, a process, a port, an abstract socket, an environment variable."""
    folder = tmp_path_factory.mktemp("victim")
    (folder / "secret").write_text("swordfish")
    (folder / "secret").chmod(0o666)
    folder.chmod(0o777)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0tandem-{os.getpid()}")
        abstract.listen()
        os.environ["TANDEM_SECRET"] = "swordfish"
        yield {
            "FOLDER": str(folder),
            "PID": sleeper.pid,
            "PARENT": os.getpid(),
            "PORT": server.getsockname()[1],
            "ABSTRACT": f"\\0tandem-{os.getpid()}",
            "sleeper": sleeper,
            "server": server,
        }
    del os.environ["TANDEM_SECRET"]
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_reaches_nothing(name: str, sandbox: Sandbox, victim: dict[str, Any]) -> None:
    code = HOSTILE[name]
    for word in ("FOLDER", "PID", "PARENT", "PORT", "ABSTRACT"):
        code = code.replace(f"{{{word}}}", str(victim[word]))
    done = sandbox.run(code.replace("{{", "{").replace("}}", "}"), "", seconds=1.0, memory=256 << 20)
    text = done["output"]
    if name != "answer in the sandbox's place":
        assert "REACHED" not in text
    assert "swordfish" not in text
    assert Path(victim["FOLDER"], "secret").read_text() == "swordfish"
    assert victim["sleeper"].poll() is None
    # The next program is the only one there is, in an empty folder, and answers are its own.
    alone = "import os\nprint(os.listdir('/tmp'), os.getpid())\ntry: os.kill(-1, 0)\nexcept OSError: print('alone')"
    assert sandbox.run(alone, "", seconds=5.0, memory=256 << 20) == {"output": "[] 1\nalone\n", "status": 0}


def test_the_sandbox_ends_with_its_grader_and_so_does_what_it_runs() -> None:
    sandbox = Sandbox()
    process = sandbox._process
    assert process.stdin is not None
    process.stdin.write(b'{"code": "while True: pass", "input": "", "seconds": 60, "memory": 268435456}\n')
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    running: set[int] = set()
    while time.monotonic() < deadline and len(running) < 2:
        running = {int(pid) for pid in children.read_text().split()}
        running |= {int(p) for pid in running for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    assert len(running) == 2
    os.kill(process.pid, signal.SIGKILL)
    sandbox.close()
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/cwd").exists() for pid in running):
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}/cwd").exists() for pid in running)
