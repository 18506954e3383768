"""GSM8K: grade-school word problems (Cobbe et al. 2021), from the hub or a local JSONL file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.envs.base import Environment, Split
from tandem.envs.data.rows import DataRow, DataSource
from tandem.envs.data.split import opening, some
from tandem.errors import EnvError
from tandem.types import Json, Task

_INSTRUCTION = "Think in a few short steps. Then end with one last line: '#### ' and the answer as a number."

_WORKING = 24
"""Characters of working, blanks left out, that an answer needs to count; the shortest gold solution has 31."""

_NOTES = re.compile(r"<<[^>]*>>")
"""Calculator annotations in the gold solutions."""


@dataclass(frozen=True, kw_only=True)
class Gsm8k(DataSource, Environment):
    """Grade-school word problems, solved in words and ended with a line "#### 72"."""

    path: str = "openai/gsm8k"
    """A data set on the hub, or a local JSONL file with question and answer (the number after ####)."""
    subset: str | None = "main"
    """The hub's configuration name."""
    test_split: str | None = "test"
    """The hub's split to hold out."""
    instruction: str = _INSTRUCTION
    """Added beneath every question."""
    system: str = ""
    """System message; empty: none."""

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        return {"math_verify": {"weight": 1.0, "least_working": _WORKING}}

    def tasks(self, split: Split) -> Sequence[Task]:
        tasks = [self._task(row, split) for row in self.rows(split, lambda row: row.text("question"))]
        return some(tasks, f"{self.name} ({self.path})", split, "add rows, change test_share or set test_path")

    def check(self, task: Task) -> str:
        solution: str = task.meta["solution"]
        if len("".join(solution.rpartition("####")[0].split())) >= _WORKING:
            return solution
        return f"This follows from what is asked: {task.meta['question']}\n{solution}"  # a row that shows no working

    def _task(self, row: DataRow, split: Split) -> Task:
        question = row.text("question")
        solution, marker, answer = _NOTES.sub("", row.text("answer")).rpartition("####")
        if not marker or not answer.strip():
            raise EnvError(
                f"{row.where}: answer should end with '#### ' and a number, got {row.text('answer')[-40:]!r}"
            )
        return Task(
            id=f"{split}/{row.number}",
            env=self.name,
            prompt=opening(question, self.system, self.instruction),
            answer=answer.strip(),
            meta={"question": question, "solution": f"{solution.rstrip()}\n#### {answer.strip()}".lstrip()},
        )
