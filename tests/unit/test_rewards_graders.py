"""Graders: whatever a reward does, it costs its own rollout and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.errors import RewardError
from tandem.metrics import flatten
from tandem.rewards.grading import workers
from tandem.rewards.grading.workers import Graders
from tandem.rewards.number import Number
from tandem.rollout.gold import gold_rollout
from tandem.types import Group, Message, Rollout, Task

pytestmark = pytest.mark.slow

GRADERS = '''
import asyncio, os, signal, subprocess, sys, time

import pickle, struct
class Code:
    def __reduce__(self): return open, ("written_by_a_pickle", "w")
CODE = pickle.dumps((0, 0, Code(), 0.0))
CODE = struct.pack("!I", len(CODE)) + CODE + b"\\n"

def text(rollout): return rollout.messages[-1].content

def plain(rollout): return float(text(rollout) == "7")
async def slow_async(rollout):
    await asyncio.sleep(0.01)
    return 0.5
def by_text(rollout):
    """Does what the policy says."""
    reply = text(rollout)
    if reply == "raise": raise ValueError("no such luck")
    if reply == "exit": sys.exit(3)
    if reply == "die": os._exit(3)
    if reply == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if reply.startswith("write"):
        for fd in range(3, 20):
            try: os.write(fd, {"write bytes": b"123456789", "write pickle": CODE}[reply])
            except OSError: pass
    if reply == "killed" or reply == "killed once" and not os.path.exists("was_killed"):
        open("was_killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if reply == "hang": time.sleep(60)
    if reply == "spin":
        while True: pass
    if reply == "child": subprocess.Popen(["sleep", "61.25"]); time.sleep(60)
    if reply == "none": return None
    if reply == "long": raise ValueError("x" * 10_000_000)
    if reply == "half": raise ValueError("half of a pair: \\ud83d")
    if reply == "arrow": print("7 \\u2192 7")
    if reply == "left": subprocess.Popen(["sleep", "61.5"])
    if reply == "fork" and os.fork() == 0:
        time.sleep(0.05)
        return 0.5
    if reply == "multi":
        import multiprocessing
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(61.5,)).start()
    if reply == "print":
        print("to stdout"); sys.stdout.flush(); os.write(1, b"raw bytes\\n"); sys.stdin.read(); return 1
    if reply in ("whole", "large"): return {"whole": 10**5000, "large": -1e308}[reply]
    return {"nan": float("nan"), "inf": float("inf"), "text": "7", "list": [1.0], "bool": True}.get(reply, 1.0)
def numpy(rollout):
    import numpy as np
    return np.float32(0.25) if text(rollout) == "scalar" else np.array([0.5])
def cwd_and_modules(rollout):
    return float("torch" in sys.modules or "transformers" in sys.modules)

def trl(completions, answer, level, **kwargs):
    return [float(c[0]["content"] == a) + l for c, a, l in zip(completions, answer, level)]
async def trl_async(prompts, completions):
    assert prompts[0] == [{"role": "user", "content": "?"}]
    return [None if c[-1]["content"] == "none" else 1 for c in completions]
def rank(completions, **kwargs):
    """Needs the siblings: the share of shorter ones."""
    for c in completions:
        if c[0]["content"] == "raise": raise ValueError("bad sibling")
        if c[0]["content"] == "hang": time.sleep(60)
        if c[0]["content"] == "die": os._exit(9)
    lengths = [len(c[0]["content"]) for c in completions]
    return [sum(other < mine for other in lengths) / len(lengths) for mine in lengths]
def together(completions, **kwargs):
    if len(completions) > 1: raise RuntimeError("only one at a time")
    return [1.0]
def short(completions, **kwargs): return [1.0]
def scalar(completions, **kwargs): return 1.0
def some_nan(completions, **kwargs): return [float("nan") if c[0]["content"] == "nan" else 1.0 for c in completions]
def wants(completions, colour): return [1.0 for _ in completions]
def two(a, b): return 1.0
number = 5
def long(rollout): raise ValueError(text(rollout) * 5000)
def by_itself(rollout):
    """Ends its process when the policy says so, in the midst of a job."""
    if text(rollout) == "die": os._exit(3)
    return 1.0

from dataclasses import dataclass
from tandem.rewards.base import Reward
@dataclass(frozen=True, kw_only=True)
class Patient(Reward):
    """May take a minute, and does not."""
    def __call__(self, rollout): return 1.0
    @property
    def call_seconds(self): return 60.0
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_graders.py").write_text(GRADERS)
    (tmp_path / "broken_graders.py").write_text("import no_such_library\n")
    (tmp_path / "exiting_graders.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def group(*replies: str, answer: str = "7", **meta: Any) -> list[Rollout]:
    task = Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer=answer, meta=meta)
    return [replace(gold_rollout(task, reply), id=f"t@0/{i}") for i, reply in enumerate(replies)]


def graded(
    specs: Mapping[str, Any], rollouts: list[Rollout], timeout: float = 5.0, **options: Any
) -> tuple[list[Rollout], dict[str, float]]:
    weighed = {name: spec if isinstance(spec, tuple) else (spec, 1.0) for name, spec in specs.items()}

    async def go() -> tuple[list[Rollout], dict[str, float]]:
        async with Graders(weighed, timeout=timeout, **options) as graders:
            return await graders.grade(rollouts), flatten(graders.metrics())

    return asyncio.run(go())


# what a reward may return


def test_weighted_sum_of_a_part_and_functions() -> None:
    specs = {
        "number": (Number(), 1.0),
        "half": ("sample_graders:slow_async", -0.5),
        "flat": ("sample_graders.plain", 0.0),
    }
    got, metrics = graded(specs, group("It is 7", "7", "8"))
    assert [rollout.rewards for rollout in got] == [
        {"number": 1.0, "half": 0.5, "flat": 0.0},
        {"number": 1.0, "half": 0.5, "flat": 1.0},
        {"number": 0.0, "half": 0.5, "flat": 0.0},
    ]
    assert [rollout.reward for rollout in got] == [0.75, 0.75, -0.25]
    assert {rollout.status for rollout in got} == {"ok"}
    assert set(metrics) == {"seconds/grading"}
    assert metrics["seconds/grading"] > 0


def test_a_rollout_of_which_no_reward_says_anything_is_left_out_of_its_group() -> None:
    got, _ = graded({"a": "sample_graders:by_text", "b": "sample_graders:trl_async"}, group("none", "7", "8"))
    assert [(rollout.status, rollout.reward) for rollout in got] == [("ok", None), ("ok", 2.0), ("ok", 2.0)]
    whole = Group(id="t@0", index=0, env="e", rollouts=tuple(got))
    assert whole.scored == tuple(got[1:])
    assert len(DrGrpo()(whole)) == 2


def test_failed_rollouts_pass_through() -> None:
    rollouts = group("7", "7")
    rollouts[0] = replace(rollouts[0], status="error", error="the engine gave up")
    got, _ = graded({"number": Number()}, rollouts)
    assert got[0] == rollouts[0]
    assert got[1].reward == 1.0


# TRL's signature


def test_trl_function_that_misses_a_column_says_which() -> None:
    got, _ = graded({"trl": "sample_graders:wants"}, group("a", "b"))
    assert all("'colour'" in rollout.error and rollout.status == "error" for rollout in got)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("together", "only one at a time"),
        ("short", "1 rewards for 3"),
        ("scalar", "expected a list: a number or None for each completion"),
    ],
)
def test_trl_function_that_returns_something_else_says_what_is_expected(name: str, message: str) -> None:
    got, _ = graded({"f": f"sample_graders:{name}"}, group("a", "b", "c"))
    assert all(rollout.status == "error" and message in rollout.error for rollout in got)


# isolation


def _sessions() -> dict[int, int]:
    """The session of each process that runs, as ``/proc`` has them."""
    sessions = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, session, *_ = file.read_text().rpartition(")")[2].split()
            if state != "Z":
                sessions[int(file.parent.name)] = int(session)
    return sessions


def _children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


@pytest.mark.parametrize(
    ("bad", "reason", "message"),
    [
        ("raise", "raised", "reward 'f' raised ValueError: no such luck (sample_graders.py:19 in by_text)"),
        ("exit", "raised", "reward 'f' raised SystemExit: 3 (sample_graders.py:20 in by_text)"),
        ("die", "crashed", "reward 'f' ended its process with exit code 3"),
        ("segv", "crashed", "reward 'f' crashed its process (SIGSEGV)"),
        ("write bytes", "crashed", "reward 'f' wrote to the pipe on which its grading process answers"),
        ("write pickle", "crashed", "reward 'f' wrote to the pipe on which its grading process answers"),
        ("hang", "timeout", "reward 'f' took longer than 0.5 s and was stopped"),
        ("spin", "timeout", "reward 'f' took longer than 0.5 s and was stopped"),
        ("nan", "bad_value", "reward 'f' returned nan; expected a number from -1e18 to 1e18, or None"),
        ("inf", "bad_value", "reward 'f' returned inf; expected a number from -1e18 to 1e18, or None"),
        ("text", "bad_value", "reward 'f' returned '7' (str); expected a number from -1e18 to 1e18, or None"),
        ("list", "bad_value", "reward 'f' returned '[1.0]' (list); expected a number from -1e18 to 1e18, or None"),
        ("large", "bad_value", "reward 'f' returned -1e+308; expected a number from -1e18 to 1e18, or None"),
        (
            "whole",
            "bad_value",
            "reward 'f' returned a whole number of 16610 bits; expected a number from -1e18 to 1e18, or None",
        ),
    ],
)
def test_failure_costs_one_rollout(tmp_path: Path, bad: str, reason: str, message: str) -> None:
    specs = {"f": "sample_graders:by_text", "number": Number()}
    got, metrics = graded(specs, group("7", bad, "8"), 0.5, log=tmp_path / "graders.log")
    assert [rollout.reward for rollout in got] == [2.0, None, 1.0]
    assert [rollout.status for rollout in got] == ["ok", "error", "ok"]
    assert got[1].error == message
    assert "f" not in got[1].rewards
    assert metrics[f"grading/failed_{reason}"] == 1.0
    assert metrics.get("grading/restarts", 0.0) == (reason in ("crashed", "timeout"))
    assert not Path("written_by_a_pickle").exists()


def test_the_text_of_an_error_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"
    got, _ = graded({"f": "sample_graders:by_text"}, group("7", "long"), log=log)
    assert got[1].error.startswith("reward 'f' raised ValueError: xxx")
    assert "... (10000000 characters)" in got[1].error
    assert len(got[1].error) < 11_000
    assert log.stat().st_size < 100_000


def test_a_grader_killed_from_elsewhere_costs_nothing() -> None:
    got, metrics = graded({"f": "sample_graders:by_text", "r": "sample_graders:rank"}, group("7", "killed once", "8"))
    assert [rollout.rewards["f"] for rollout in got] == [1.0] * 3
    assert metrics["grading/restarts"] == 1.0
    assert "grading/failed_crashed" not in metrics


def test_a_call_whose_grader_is_killed_each_time_fails() -> None:
    got, metrics = graded({"f": "sample_graders:by_text"}, group("7", "killed"))
    assert [rollout.status for rollout in got] == ["ok", "error"]
    assert "crashed its process (SIGKILL, sent from elsewhere: is the machine out of memory?)" in got[1].error
    assert metrics["grading/restarts"] == 3.0


@pytest.mark.parametrize("leaving", ["left", "fork", "multi"])
def test_what_a_reward_started_ends_with_its_process(leaving: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And a forked child that comes back from the reward neither answers nor keeps the run waiting."""

    async def go() -> tuple[list[Rollout], int]:
        async with Graders({"f": ("sample_graders:by_text", 1.0)}) as graders:
            got = [*await graders.grade(group("7", leaving, "8")), *await graders.grade(group("7", leaving))]
            (session,) = {of for pid, of in _sessions().items() if of == pid and pid in _children()}
            return got, session

    got, session = asyncio.run(go())
    assert [rollout.reward for rollout in got] == [1.0] * 5
    deadline = time.monotonic() + 30
    while left := [pid for pid, of in _sessions().items() if of == session]:
        assert time.monotonic() < deadline, f"{left} outlived the graders"
        time.sleep(0.05)
    gc.collect()  # where asyncio would complain of a pipe that somebody keeps open
    assert "Traceback" not in capfd.readouterr().err


def test_prints_do_not_disturb_and_end_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"
    got, _ = graded({"f": "sample_graders:by_text"}, group("print", "raise", "7"), log=log)
    assert [rollout.reward for rollout in got] == [1.0, None, 1.0]
    text = log.read_text()
    assert "to stdout" in text
    assert "raw bytes" in text
    assert "ValueError: no such luck" in text


def test_the_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_LOG", 4096)
    log = tmp_path / "graders.log"

    async def go() -> None:
        async with Graders({"f": ("sample_graders:by_text", 1.0)}, log=log) as graders:
            await graders.grade(group(*["raise"] * 64))
            deadline = time.monotonic() + 30
            while log.stat().st_size > 4096:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await graders.grade(group("print"))

    asyncio.run(go())
    text = log.read_text()
    assert text.startswith("... what was here is gone: the log had grown too long")
    assert "raised for t@0/63:" in text
    assert text.endswith("to stdout\nraw bytes\n")


def test_killed_grader_takes_its_children_along() -> None:
    graded({"f": "sample_graders:by_text"}, group("child", "7"), 0.5)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sleep 61.25" not in running


def test_groups_are_graded_side_by_side() -> None:
    async def go() -> tuple[float, list[list[Rollout]]]:
        async with Graders({"f": ("sample_graders:by_text", 1.0)}, workers=2, timeout=0.5) as graders:
            since = time.perf_counter()
            got = await asyncio.gather(
                graders.grade(group("hang")), graders.grade(group("7")), graders.grade(group("8"))
            )
            return time.perf_counter() - since, list(got)

    _, (hung, *fine) = asyncio.run(go())
    assert hung[0].status == "error"
    assert [rollouts[0].reward for rollouts in fine] == [1.0, 1.0]


def test_answers_that_find_no_process_free_share_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60, each of a group of its own, those that raise, hang or end their process cost no other."""
    jobs: list[int] = []
    grade = Graders.grade

    async def noted(graders: Graders, rollouts: Sequence[Rollout]) -> list[Rollout]:
        jobs.append(len(rollouts))
        return await grade(graders, rollouts)

    monkeypatch.setattr(Graders, "grade", noted)
    replies = ["7", "raise", "7", "die", "7", "hang", *["7"] * 54]
    answers = [replace(rollout, id=f"t@{i}/0") for i, rollout in enumerate(group(*replies))]

    async def go() -> list[Rollout]:
        async with Graders({"f": ("sample_graders:by_text", 1.0)}, workers=2, timeout=1.0) as graders:
            return list(await asyncio.gather(*map(graders.grade_one, answers)))

    got = asyncio.run(go())
    assert [rollout.id for rollout in got] == [rollout.id for rollout in answers]
    assert [rollout.reward for rollout in got] == [None if reply != "7" else 1.0 for reply in replies]
    # Two processes are free; then each job is a quarter of those that wait, and eight at most.
    assert jobs == [1, 1, 8, 8, 8, 8, 7, 5, 4, 3, 2, 2, 1, 1, 1]
    assert sum(jobs) == 60


def test_answers_that_are_not_graded_any_more_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> list[Any]:
        async with Graders({"f": ("sample_graders:by_text", 1.0)}, timeout=30.0) as graders:
            under_way, behind = (asyncio.ensure_future(graders.grade_one(*group(reply))) for reply in ("hang", "7"))
            await asyncio.sleep(0.2)
        ended = await asyncio.gather(under_way, behind, return_exceptions=True)

        async def refuses(graders: Graders, rollouts: Sequence[Rollout]) -> list[Rollout]:
            raise RewardError("no process starts")

        monkeypatch.setattr(Graders, "grade", refuses)
        graders = Graders({"f": ("sample_graders:by_text", 1.0)})
        return [*ended, *await asyncio.gather(*map(graders.grade_one, group("7", "8")), return_exceptions=True)]

    ended = asyncio.run(asyncio.wait_for(go(), 20))
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2 + [RewardError] * 2


def test_a_worker_killed_while_idle_is_replaced_without_blame() -> None:
    async def go() -> list[Rollout]:
        async with Graders({"number": (Number(), 1.0)}) as graders:
            await graders.grade(group("7"))
            (worker,) = graders._pools[0]._workers
            os.kill(worker._process.pid, signal.SIGKILL)
            await worker._process.wait()
            return await graders.grade(group("7", "8"))

    assert [rollout.reward for rollout in asyncio.run(go())] == [1.0, 0.0]


def test_cancelled_grading_does_not_leak_into_the_next_group() -> None:
    async def go() -> list[Rollout]:
        async with Graders({"f": ("sample_graders:by_text", 1.0), "n": (Number(), 1.0)}, timeout=30.0) as graders:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(graders.grade(group("hang", "hang")), 0.2)
            return await graders.grade(group("7", "8"))

    assert [rollout.reward for rollout in asyncio.run(go())] == [2.0, 1.0]


# opening and ending


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such.mod:fn", "reward 'f' cannot be used: ModuleNotFoundError: No module named 'no_such'"),
        ("sample_graders:missing", "reward 'f' cannot be used: AttributeError: .*sample_graders.*missing"),
        ("broken_graders:fn", "cannot be used: ModuleNotFoundError: No module named 'no_such_library'"),
        ("exiting_graders:fn", "cannot be used: ImportError: it raised SystemExit"),
        ("sample_graders:number", "is a int; expected"),
        ("sample_graders:two", r"cannot be used: TypeError: it takes \(a, b\); expected f\(rollout\)"),
    ],
)
def test_reward_that_cannot_be_used_is_told_at_once(spec: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        graded({"good": Number(), "f": spec}, [])


def test_a_reward_that_cannot_travel_is_refused_before_anything_starts() -> None:
    with pytest.raises(RewardError, match=r"cannot be sent to a grading process.*top level of a module"):
        Graders({"f": (_local(), 1.0)})


def _local() -> Number:
    class Local(Number):
        pass

    return Local()


@dataclass(frozen=True, kw_only=True)
class Unreachable(Number):
    """A part whose module the worker cannot import."""


def test_part_that_does_not_import_in_the_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unreachable, "__module__", "nowhere_to_be_found")
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", sys.modules[__name__])
    with pytest.raises(RewardError, match="nowhere_to_be_found"):
        graded({"mine": Unreachable()}, [])


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from tandem.rewards.grading.workers import Graders
        from tandem.rollout.gold import gold_rollout
        from tandem.types import Message, Task

        async def main():
            async with Graders({"f": ("sample_graders:by_text", 1.0)}, workers=2, timeout=60) as graders:
                task = Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer="")
                hang = asyncio.ensure_future(graders.grade([gold_rollout(task, "spin")]))
                await asyncio.sleep(0.2)
                print(*[worker._process.pid for worker in graders._pools[0]._workers], flush=True)
                await hang

        asyncio.run(main())
        """
    )
    path = os.pathsep.join([*sys.path, str(tmp_path)])
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_running(pid) for pid in workers)


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_what_was_answered_before_a_crash_is_not_asked_again() -> None:
    got, metrics = graded({"a": "sample_graders:by_itself"}, group("7", "8", "die", "9"))
    assert [rollout.status for rollout in got] == ["ok", "ok", "error", "ok"]
    assert metrics["grading/restarts"] == 1


def test_a_reward_that_may_take_long_hides_no_other_that_hangs() -> None:
    import sample_graders

    begun = time.monotonic()
    got, _ = graded(
        {"patient": sample_graders.Patient(), "b": "sample_graders:by_text"}, group("7", "hang", "8"), timeout=0.5
    )
    assert [rollout.status for rollout in got] == ["ok", "error", "ok"]
    assert "took longer than 0.5 s" in got[1].error
    assert time.monotonic() - begun < 40
