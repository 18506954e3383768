"""Tests of a program that the policy wrote, run in a sandbox: stdin and stdout, or asserts."""

from __future__ import annotations

import atexit
import functools
import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.errors import RewardError, bounded
from tandem.rewards.base import Reward
from tandem.types import Json, Rollout, column

_SANDBOX = Path(__file__).with_name("_sandbox.py")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_ASSERTED = """\
space = {{"__name__": "program"}}
exec(compile({program!r}, "program", "exec"), space)
exec(compile({asserts!r}, "tests", "exec"), space)
print({word!r})
"""
"""A program and asserts of it; the word is printed if neither ended the process."""


class CodeTest(NamedTuple):
    """One test: asserts, or what a program prints for an input, spaces at the ends of lines left out."""

    asserts: str = ""
    input: str = ""
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class CodeTests(Reward):
    """Tests that the Python program in the reply's last fenced block passes; it has the standard library."""

    tests: str = "tests"
    """Column of the tests: asserts as text or a list of texts; or {input, output}, a list of these, or {inputs,
    outputs}. JSON text of any of them too."""
    count: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0. share: how many of them do."""
    test_seconds: float = bounded(4.0, above=0)
    """How long one test may take."""
    seconds: float = bounded(20.0, above=0)
    """How long all tests of one program may take; those that are left then have failed."""
    memory_mb: int = bounded(512, least=64)
    """Most memory of a program."""
    isolated: bool = True
    """false: where the kernel gives no namespaces, programs run all the same, as this user, with bounded resources."""

    def prepare(self) -> None:
        """Start the sandbox.

        Raises:
            RewardError: programs could reach the machine, and ``isolated`` asks that they cannot.
        """
        if self.isolated and not _sandbox().isolated:
            raise RewardError(
                "reward code_tests cannot keep programs away from this machine: its kernel gives this user no "
                "namespaces (sysctl kernel.unprivileged_userns_clone, or the container's seccomp profile); allow them, "
                "or set isolated: false where a program that nobody has read may do what you may"
            )

    def __call__(self, rollout: Rollout) -> float:
        tests = list(read_tests(column(rollout.task.meta, self.tests)))
        if not tests:
            raise ValueError(f"task {rollout.task.id} has no test in its column {self.tests!r}")
        program, end, passed = program_of(rollout.final_message), time.monotonic() + self.seconds, 0
        for test in tests:
            seconds = min(self.test_seconds, end - time.monotonic())
            if seconds > 0 and _passes(program, test, seconds, self.memory_mb << 20):
                passed += 1
            elif self.count == "all":
                return 0.0
        return passed / len(tests)

    def phrase(self, answer: str) -> str:
        return answer if _FENCE.search(answer) else f"```python\n{answer}\n```"

    @property
    def call_seconds(self) -> float:
        """Longer than its tests may take, so that it is they that fail."""
        return self.seconds + 10.0


def program_of(reply: str) -> str:
    """The last fenced block of a reply, or all of it where there is none."""
    blocks: list[str] = _FENCE.findall(reply)
    return blocks[-1] if blocks else reply


def read_tests(value: Json) -> Iterator[CodeTest]:
    """The tests that a column holds.

    Raises:
        ValueError: it holds something else.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = json.loads(value)
    if isinstance(value, str):
        yield CodeTest(asserts=value)
    elif isinstance(value, list):
        for each in value:
            yield from read_tests(each)
    elif isinstance(value, dict) and value.keys() == {"input", "output"}:
        yield CodeTest(input=value["input"], output=value["output"])
    elif isinstance(value, dict) and value.keys() == {"inputs", "outputs"}:
        for input, output in zip(value["inputs"], value["outputs"], strict=True):
            yield CodeTest(input=input, output=output)
    else:
        raise ValueError(f"expected asserts, or input and output, or inputs and outputs, got {str(value)[:80]}")


def _passes(program: str, test: CodeTest, seconds: float, memory: int) -> bool:
    run = functools.partial(_sandbox().run, seconds=seconds, memory=memory)
    if not test.asserts:
        done = run(program, test.input)
        return bool(done["status"] == 0) and _lines(done["output"]) == _lines(test.output)
    word = secrets.token_hex(16)
    return bool(
        run(_ASSERTED.format(program=program, asserts=test.asserts, word=word), "")["output"].endswith(f"{word}\n")
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@functools.cache
def _sandbox() -> Sandbox:
    """That of this grading process."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


class Sandbox:
    """Runs programs one after the other, each in a process of its own that sees nothing of this machine."""

    def __init__(self) -> None:
        """Start it, in the interpreter that stands behind a virtual environment."""
        python = Path(sys.base_prefix, "bin", Path(sys.executable).resolve().name)
        self._process = subprocess.Popen(
            [python if python.exists() else sys.executable, "-I", "-S", _SANDBOX],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"LANG": "C.UTF-8"},  # a program can read all that its process was given
        )
        self.isolated: bool = self._answer()["isolated"]

    def run(self, code: str, input: str, *, seconds: float, memory: int) -> dict[str, Any]:
        """What a program printed, and its exit status: None if it was stopped."""
        assert self._process.stdin is not None
        request = {"code": code, "input": input, "seconds": seconds, "memory": memory}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            _sandbox.cache_clear()
            self.close()
            raise RewardError(f"the sandbox ended with status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer
