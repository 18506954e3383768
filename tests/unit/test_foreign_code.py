"""A mistake in somebody's own environment is told in one line that says whose it is and where, never as a bug."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem import errors
from tandem.cli.app import main
from tandem.config.sources import EnvSource
from tandem.errors import EnvError
from tandem.rollout.gold import siblings
from tandem.rollout.group_runner import GroupRunner
from tandem.trainer import environments

ENVIRONMENT = """
from dataclasses import dataclass

from tandem.envs.arithmetic import Arithmetic


@dataclass(frozen=True, kw_only=True)
class Mine(Arithmetic):
    wrong: str = ""

    def tasks(self, split):
        tasks = super().tasks(split)
        if self.wrong == "raises":
            return tasks[len(self.missing)]
        if self.wrong == "generator":
            return (task for task in tasks)
        if self.wrong == "texts":
            return ["1 + 1", "2 + 2"]
        if self.wrong == "empty":
            return []
        return None if self.wrong == "none" else tasks

    def check(self, task):
        return 1 / 0 if self.wrong == "check raises" else 7 if self.wrong == "check" else super().check(task)

    async def play(self, task, chat):
        mixed = {"calls": 1.0, "tool": "calculator"}
        return {"mixed": mixed, "keys": {1: 2.0}, "nothing": None, "list": [1.0], "fine": {"calls": True}}[self.wrong]


def leave():
    raise SystemExit(0)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def make(wrong: str) -> Any:
        from my_env import Mine  # type: ignore[import-not-found]

        return Mine(wrong=wrong)

    yield make
    sys.modules.pop("my_env", None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("raises", "tasks('train') raised AttributeError: 'Mine' object has no attribute 'missing' (my_env.py:14 in"),
        ("none", "tasks('train') (my_env.py:11) returned NoneType; expected a sequence of Task"),
        ("generator", "(my_env.py:11) returned generator; expected a sequence of Task, such as list("),
        ("texts", "(my_env.py:11) returned a sequence whose first entry is str; expected Task"),
        ("empty", "mine has no train tasks"),
    ],
)  # fmt: skip
def test_tasks(mine: Callable[[str], Any], wrong: str, message: str) -> None:
    with pytest.raises(EnvError) as caught:
        environments.tasks_of("mine", EnvSource(env=mine(wrong)), "train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tasks_that_are_right(mine: Callable[[str], Any]) -> None:
    assert len(environments.tasks_of("mine", EnvSource(env=mine("")), "train")) > 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("check raises", "raised ZeroDivisionError: division by zero (my_env.py:24 in check)"),
        ("check", "check() (my_env.py:23) returned a int for task"),
    ],
)
def test_check(mine: Callable[[str], Any], wrong: str, message: str) -> None:
    env = mine(wrong)
    with pytest.raises(EnvError) as caught:
        asyncio.run(siblings(env, graders=None, tasks=env.tasks("train")[:2]))  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("mixed", "returned {'calls': 1.0, 'tool': 'calculator'}; expected a mapping of numbers by name"),
        ("keys", "returned {1: 2.0}; expected a mapping of numbers by name"),
        ("nothing", "returned None; expected a mapping of numbers by name"),
        ("list", "returned [1.0]; expected a mapping of numbers by name"),
        ("fine", ""),
    ],
)
def test_metrics(mine: Callable[[str], Any], wrong: str, message: str) -> None:
    env = mine(wrong)
    worker = GroupRunner(name="mine", env=env, engine=None, graders=None, template=None, seed=0)  # type: ignore[arg-type]
    task, never = env.tasks("train")[0], _Never()
    rollout = asyncio.run(worker._play(task, (1,), "mine/1", never))  # type: ignore[arg-type]
    if not message:
        assert (rollout.status, rollout.metrics) == ("ok", {"calls": 1.0})
        return
    assert rollout.status == "error"
    assert rollout.error.startswith(f"environment: play() (my_env.py:26) {message}")


class _Never:
    """Sampling that nobody reads."""

    max_tokens = 1


def test_the_command_line_tells_whose_an_error_is(
    mine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine("")
    import my_env  # type: ignore[import-not-found]

    from tandem.cli import list_parts

    def theirs(category: str | None) -> None:
        my_env.Mine.check(my_env.Mine(wrong="check raises"), None)

    def ours(category: str | None) -> Mapping[str, int]:
        return errors.SHOWN_TEXT.there  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(list_parts, "list_parts", theirs)
    with pytest.raises(SystemExit) as ended:
        main(["list"])
    stderr = capsys.readouterr().err
    assert ended.value.code == 1
    assert stderr.startswith("tandem: ZeroDivisionError: division by zero (my_env.py:24 in check")
    assert "it is your code, and --debug shows how" in stderr
    assert len(stderr.splitlines()) == 1
    with pytest.raises(SystemExit):
        main(["list", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_user_code_that_calls_sys_exit_does_not_end_a_verb_in_silence(
    mine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine("")
    import my_env

    from tandem.cli import list_parts

    monkeypatch.setattr(list_parts, "list_parts", lambda category: my_env.leave())
    with pytest.raises(SystemExit) as ended:
        main(["list"])
    assert ended.value.code == 1
    assert "tandem: your code ended the process: SystemExit: 0 (my_env.py:" in capsys.readouterr().err


def test_code_of_tandem_is_not_theirs() -> None:
    with pytest.raises(AttributeError) as caught:
        errors.raised(None)  # type: ignore[arg-type]
    error = caught.value
    assert error.__traceback__ is not None
    assert not errors.is_theirs(error.with_traceback(error.__traceback__.tb_next))
