"""A run that was ended at any moment and resumed is the run that was never ended, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.atropos_peers import packages_python, verifiers_python
from support.processes import start
from support.tiers import long_but

from tandem.envs.arithmetic import Arithmetic

ROOT = Path(__file__).parents[2]
REWARD = '''
import os, time

def odd(completions, **columns):
    """Right half of the time, so that every fourth group is flat."""
    time.sleep(float(os.environ.get("SLOW", 0)))
    return [float(sum(messages[-1]["content"].encode()) % 2) for messages in completions]
'''
STEPS = 6
RECIPE: dict[str, Any] = {
    "steps": STEPS,
    "env": {"kind": "arithmetic", "max_number": 12},
    "rewards": {"marks:odd": 1.0},
    "groups_per_step": 3,
    "group_size": 3,
    "dtype": "float32",
    "sampling": {"max_tokens": 12},
    "optimizer": {"lr": 1.0e-3, "warmup_steps": 2, "schedule": "linear"},
    "evaluate": {"tasks": 3, "samples": 2, "every": 2},
    "checkpoint": {"every": 1},
    "loggers": [],
    "threads": 1,
    "seed": 3,
}


@dataclass
class Started:
    """A run in a process of its own."""

    process: subprocess.Popen[str]
    folder: Path
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def output_text(self) -> str:
        return self.output.read_text()

    def code(self) -> int | None:
        """How it ended, negative by a signal; None while it runs."""
        return self.process.poll()

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait for something to happen in its folder."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.code() is None, f"it ended by itself: {self.output_text()}"
            assert time.monotonic() < deadline, f"it did not come to it in {seconds} s: {self.output_text()}"
            time.sleep(0.0005)

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def kill(self) -> None:
        """``kill -9``; nothing that it started may outlive it."""
        children = self.children()
        assert children, "its grader should be running"
        os.kill(self.pid, signal.SIGKILL)
        self.ended(-signal.SIGKILL)
        deadline = time.monotonic() + 10
        while alive := [child for child in children if _alive(child)]:
            assert time.monotonic() < deadline, f"{alive} outlived the run"
            time.sleep(0.01)

    def ended(self, code: int) -> str:
        """Wait for its end; what it said."""
        deadline = time.monotonic() + 120
        while self.code() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.output_text()}"
            time.sleep(0.005)
        assert self.code() == code, self.output_text()
        return self.output_text()

    def has(self, step: int) -> bool:
        return (self.folder / "checkpoints" / f"{step:06d}").is_dir()

    def evaluated(self) -> bool:
        file = self.folder / "eval.jsonl"
        return file.exists() and file.stat().st_size > 0

    def emitted(self) -> int:
        file = self.folder / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass(frozen=True)
class Place:
    """A folder to run in."""

    path: Path
    started: list[Started] = field(default_factory=list)

    def start(self, target: str, *overrides: str, name: str, slow: float = 0.0) -> Started:
        output = self.path / f"{name}-{len(self.started)}.txt"
        words = ["train", target, *overrides]
        environment = {**os.environ, "SLOW": str(slow)}
        process = start(words, out=output, environment=environment, cwd=self.path)
        self.started.append(Started(process, self.path / "runs" / name, output))
        return self.started[-1]

    def run(self, *arguments: str, name: str) -> Path:
        """A run to its end."""
        started = self.start(*arguments, name=name)
        assert "Traceback" not in started.ended(0)
        return started.folder


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("resume")
    (path / "marks.py").write_text(REWARD)
    (path / "recipe.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **RECIPE}))
    assert "PYTHONHASHSEED" not in os.environ, "both would have that one"
    place = Place(path)
    yield place
    for run in place.started:
        if run.code() is None:  # of a test that failed
            os.kill(run.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(place: Place) -> Path:
    """The run that all others must equal."""
    folder = place.run("recipe.yaml", "name=whole", name="whole")
    dropped = [e for e in rows(folder / "events.jsonl") if e["event"] == "group_dropped"]
    assert {e["reason"] for e in dropped} == {"zero_variance"}, "without drops and refills this proves less"
    return folder


MIXTURE: dict[str, Any] = {
    **{key: value for key, value in RECIPE.items() if key not in ("env", "rewards")},
    "groups_per_step": 4,
    "on_policy_tail": "abort",
    "seed": 5,
    "envs": {
        "small": {"env": {"kind": "arithmetic", "max_number": 12}, "rewards": {"marks:odd": 1.0}, "min_share": 0.25},
        "large": {"env": {"kind": "arithmetic", "max_number": 99}, "rewards": {"marks:odd": 2.0}, "weight": 2.0},
    },
}


@pytest.fixture(scope="module")
def mixed(place: Place, tiny_model: Path) -> Path:
    """A run of several environments that was never ended."""
    (place.path / "mixture.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **MIXTURE}))
    folder = place.run("mixture.yaml", "name=mixed", name="mixed")
    dropped = {e["group"].partition("/")[0] for e in rows(folder / "events.jsonl") if e["event"] == "group_dropped"}
    assert dropped == {"small", "large"}, "without drops and refills of each this proves less"
    return folder


REUSING: dict[str, Any] = {
    **RECIPE,
    "group_size": 2,  # every other group is flat
    "replay": {"size": 2, "max_age": 1},
    "reroll": {"start_fraction": 0.2, "max_groups": 2},
    "max_resample_times": 1,
    "curriculum": "solve_rate",
    "seed": 4,
}


@pytest.fixture(scope="module")
def reusing(place: Place, tiny_model: Path) -> Path:
    """A run that was never ended, and that replays groups, draws unsolved tasks again and keeps flat groups."""
    (place.path / "reusing.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **REUSING}))
    folder = place.run("reusing.yaml", "name=reused", name="reused")
    happened = {e["event"] for e in rows(folder / "events.jsonl")}
    assert {"group_replayed", "group_rerolled", "zero_variance_group_kept"} <= happened, "without them this proves less"
    return folder


WARM: dict[str, Any] = {
    **RECIPE,
    "warm_start": {"steps": 3, "lr": 5.0e-4},
    "reference": {"kind": "start", "beta": 0.05},
    "zero_variance_groups": "keep",
    "seed": 6,
}


@pytest.fixture(scope="module")
def warm(place: Place, tiny_model: Path) -> Path:
    """A run that was never ended: three steps on gold replies, then three on the policy's own answers."""
    (place.path / "warm.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **WARM}))
    folder = place.run("warm.yaml", "name=warm", name="warm")
    metrics = [row["metrics"] for row in rows(folder / "metrics.jsonl")]
    assert [step.get("demonstrations") for step in metrics] == [3, 3, 3, None, None, None]
    assert [step.get("groups/trained") for step in metrics] == [None, None, None, 3, 3, 3]
    assert [round(step["lr"], 9) for step in metrics] == [2.5e-4, 5e-4, 0.0, 5e-4, 1e-3, 0.0]
    assert metrics[3]["kl_reference"] == 0, "the reference is what the warm start has made"
    assert metrics[5]["kl_reference"] > 0
    losses = [row["loss"] for row in rows(folder / "eval.jsonl")]
    assert losses[1] < losses[0]
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def state(folder: Path, step: int = STEPS) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "checkpoints" / f"{step:06d}" / "state.json").read_text())
    return loaded


def trained(folder: Path) -> list[dict[str, Any]]:
    """Every trained rollout, in order."""
    return [row for path in sorted((folder / "rollouts").glob("*.jsonl")) for row in rows(path)]


def same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, what was trained on and what was written down are equal, bit for bit."""
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        last = Path("checkpoints") / f"{STEPS:06d}" / file
        assert (one / last).read_bytes() == (other / last).read_bytes(), file
    assert trained(one) == trained(other)
    ends = [state(folder) for folder in (one, other)]
    for end in ends:
        del end["cursor"]["admitted"]  # groups that are played again count again
    assert ends[0] == ends[1]
    measured = [[comparable(row) for row in rows(folder / "metrics.jsonl")] for folder in (one, other)]
    assert measured[0] == measured[1]
    evaluated = [
        [(r["step"], r["mean"], r["rollouts"], r.get("loss")) for r in rows(f / "eval.jsonl")] for f in (one, other)
    ]
    assert evaluated[0] == evaluated[1]
    assert [step for step, *_ in evaluated[0]] == [0, 2, 4, 6]


def comparable(row: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """A step's numbers that do not depend on the machine's mood. What was played counts once, if a run was stopped in
    the middle of a step it is spread over two processes, of which the second tells the rest."""
    names = ("loss", "grad_norm", "lr", "tokens/trained", "kl_behavior", "ratio", "clip_fraction", "advantage/std")
    return row["step"], {name: row["metrics"][name] for name in names if name in row["metrics"]}


def while_saving(run: Started) -> None:
    """Stop it in the middle of writing a checkpoint, and see that it is in the middle."""
    folder = run.folder / "checkpoints"
    while True:
        run.until(lambda: any(path.name > ".000001.tmp" for path in folder.glob(".*.tmp")))
        os.kill(run.pid, signal.SIGSTOP)
        if any(not run.has(int(path.name[1:7])) for path in folder.glob(".*.tmp")):
            return
        os.kill(run.pid, signal.SIGCONT)


MOMENTS: dict[str, Callable[[Started], None]] = {
    "after step three": lambda run: run.until(lambda: run.has(3)),
    "while saving": while_saving,
    # What is left of the step after its checkpoint is nothing, so the next groups are being sampled.
    "while generating": lambda run: (run.until(lambda: run.has(2)), time.sleep(0.02))[1],
    "before the first checkpoint": lambda run: run.until(run.evaluated),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", long_but(MOMENTS, "while saving"))
def test_killed_and_resumed_equals_uninterrupted(place: Place, uninterrupted: Path, moment: str) -> None:
    """Its checkpoints are written while it goes on; those of the one that is not killed are waited for."""
    name = moment.replace(" ", "-")
    run = place.start("recipe.yaml", f"name={name}", "checkpoint.asynchronous=true", name=name, slow=0.02)
    MOMENTS[moment](run)
    run.kill()
    assert not run.has(STEPS), "it was too fast to be killed in time"
    if moment == "while saving":
        assert list((run.folder / "checkpoints").glob(".*.tmp"))
    resumed = place.run(f"runs/{name}", name=name)
    assert not list((resumed / "checkpoints").glob(".*"))
    assert [r["step"] for r in rows(resumed / "metrics.jsonl")] == list(range(1, STEPS + 1))
    same_run(uninterrupted, resumed)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["after step three", "while generating"])
def test_several_environments_killed_and_resumed_equal_uninterrupted(place: Place, mixed: Path, moment: str) -> None:
    name = f"mixed-{moment.replace(' ', '-')}"
    run = place.start("mixture.yaml", f"name={name}", name=name, slow=0.02)
    MOMENTS[moment](run)
    run.kill()
    assert not run.has(STEPS), "it was too fast to be killed in time"
    resumed = place.run(f"runs/{name}", name=name)
    same_run(mixed, resumed)
    made = [Counter(env for _, env in {(row["group"], row["env"]) for row in trained(resumed) if row["step"] == step})
            for step in range(1, STEPS + 1)]  # fmt: skip
    assert made == [{"large": 3, "small": 1}, {"large": 2, "small": 2}, {"large": 3, "small": 1}] * 2
    for row in rows(resumed / "metrics.jsonl"):
        assert row["metrics"]["env/small/trained"] == made[row["step"] - 1]["small"]
    for row in rows(resumed / "eval.jsonl"):
        assert row["mean"] == pytest.approx((row["envs"]["small"]["mean"] + row["envs"]["large"]["mean"]) / 2)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["after step three", "while generating"])
def test_what_is_reused_is_reused_alike_after_a_kill(place: Place, reusing: Path, moment: str) -> None:
    name = f"reused-{moment.replace(' ', '-')}"
    run = place.start("reusing.yaml", f"name={name}", name=name, slow=0.02)
    MOMENTS[moment](run)
    run.kill()
    assert not run.has(STEPS), "it was too fast to be killed in time"
    assert state(run.folder, 2 if run.has(2) else 3)["cursor"]["stored"], "there is something to forget"
    resumed = place.run(f"runs/{name}", name=name)
    same_run(reusing, resumed)
    for step, row in enumerate(rows(resumed / "metrics.jsonl")):
        whole = rows(reusing / "metrics.jsonl")[step]["metrics"]
        counted = ("groups/kept_zero_variance", "groups/replayed", "replay/age/mean", "samples/without_advantage")
        assert [row["metrics"].get(one) for one in counted] == [whole.get(one) for one in counted]


@pytest.mark.slow
@pytest.mark.parametrize("step", long_but([2, 3, 4], 3))
def test_warm_start_killed_and_resumed_equals_uninterrupted(place: Place, warm: Path, step: int) -> None:
    name = f"warm-{step}"
    run = place.start("warm.yaml", f"name={name}", name=name, slow=0.02)
    run.until(lambda: run.has(step))
    run.kill()
    assert not run.has(STEPS), "it was too fast to be killed in time"
    same_run(warm, place.run(f"runs/{name}", name=name))


PACKAGES: dict[str, Any] = {
    "verifiers": {"kind": "verifiers", "id": "tandem-guess", "python": verifiers_python},
    "gymnasium": {"kind": "gymnasium", "id": "vowels_env:Vowels-v0", "python": packages_python},
}


@pytest.mark.parametrize("kind", long_but(PACKAGES, "verifiers"))
def test_an_environment_of_a_package_killed_and_resumed_loses_and_repeats_nothing(
    kind: str, place: Place, tiny_model: Path
) -> None:
    for module in ("recipes/vowels_env.py", "tests/support/verifiers_envs/tandem_guess.py"):
        shutil.copy(ROOT / module, place.path)
    env = {**PACKAGES[kind], "python": str(PACKAGES[kind]["python"]())}
    recipe = {**RECIPE, "model": str(tiny_model), "env": env, "rewards": {"environment": 1.0}}
    (place.path / f"{kind}.yaml").write_text(yaml.safe_dump(recipe))
    whole = place.run(f"{kind}.yaml", f"name={kind}", name=kind)
    name = f"{kind}-killed"
    run = place.start(f"{kind}.yaml", f"name={name}", name=name)
    run.until(lambda: run.has(3))
    run.kill()
    assert not run.has(STEPS), "it was too fast to be killed in time"
    same_run(whole, place.run(f"runs/{name}", name=name))


SIGNALS: dict[str, tuple[int, Callable[[Started], bool]]] = {
    "Ctrl-C": (signal.SIGINT, lambda run: run.emitted() >= 2),
    "SIGTERM": (signal.SIGTERM, lambda run: run.emitted() >= 3),
    "SIGHUP": (signal.SIGHUP, lambda run: run.emitted() >= 2),
    "SIGQUIT": (signal.SIGQUIT, lambda run: run.emitted() >= 3),
    "Ctrl-C in the first step": (signal.SIGINT, lambda run: run.evaluated()),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", long_but(SIGNALS, "Ctrl-C"))
def test_stopped_by_a_signal_saves_says_how_to_go_on_and_goes_on(place: Place, uninterrupted: Path, how: str) -> None:
    number, moment = SIGNALS[how]
    name = how.replace(" ", "-")
    # No checkpoint but the one that the signal asks for.
    run = place.start("recipe.yaml", f"name={name}", "checkpoint.every=100", name=name, slow=0.02)
    run.until(lambda: moment(run))
    os.killpg(run.pid, number)  # as a terminal does: to the whole group
    output = run.ended(130)
    assert "Traceback" not in output
    step = run.emitted()
    assert step < STEPS
    assert output.splitlines()[-1] == (
        f"tandem: stopped at step {step}, everything is saved; go on with: tandem train runs/{name}"
    )
    assert len(output.splitlines()) == 2, output  # it also says that it is stopping
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"{step:06d}"]
    assert rows(run.folder / "events.jsonl")[-1]["event"] == "interrupted"
    assert (run.folder / "report.html").exists()
    same_run(uninterrupted, place.run(f"runs/{name}", name=name))


@pytest.mark.long
def test_no_prompt_is_trained_twice_or_lost_with_sampling_ahead(place: Place) -> None:
    name = "ahead"
    run = place.start("recipe.yaml", f"name={name}", "max_lag=1", name=name, slow=0.02)
    run.until(lambda: run.has(2))
    run.kill()
    saved = max(int(path.name) for path in (run.folder / "checkpoints").iterdir() if path.name.isdigit())
    before = state(run.folder, saved)["cursor"]
    run = place.start(f"runs/{name}", name=name, slow=0.02)
    run.until(lambda: run.has(saved + 2))
    os.killpg(run.pid, signal.SIGINT)
    run.ended(130)
    folder = place.run(f"runs/{name}", name=name)

    at = {row["group"]: row["step"] for row in trained(folder)}
    times = [(row["step"], row["group"]) for row in trained(folder)]
    assert len(set(times)) == len(at) == STEPS * RECIPE["groups_per_step"], "a group was trained twice"
    for row in trained(folder):
        assert row["step"] - 1 - row["versions"][0] <= 1, "older than max_lag allows"
    kept_words(before, folder)

    order = drawn()
    end = state(folder)["cursor"]
    waiting = {order[number] for _, number in end["again"]} | {order[number] for (_, number), _ in end["ready"]}
    dropped = {e["group"] for e in rows(folder / "events.jsonl") if e["event"] == "group_dropped"}
    admitted = {order[number] for number in range(end["drawn"]["arithmetic"])}
    assert admitted == set(at) | dropped & admitted | waiting, "a group was lost"
    assert not set(at) & waiting


def kept_words(cursor: dict[str, Any], folder: Path) -> None:
    """Groups that were ready when the run was killed are trained as they were sampled, not sampled anew."""
    ready = {group["id"]: group for _, group in cursor["ready"]}
    for row in trained(folder):
        if row["group"] in ready:
            rollout = ready[row["group"]]["rollouts"][int(row["rollout"].rpartition("/")[2])]
            sampled = [token for turn in rollout["turns"] for token in turn["completion"]["tokens"]]
            assert [token["id"] for token in row["tokens"]] == sampled


def drawn() -> dict[int, str]:
    """Group ids by draw, from the recipe alone."""
    tasks = Arithmetic(max_number=RECIPE["env"]["max_number"]).tasks("train")
    order = list(range(len(tasks)))
    random.Random(f"{RECIPE['seed']}/0").shuffle(order)
    return {draw: f"{tasks[place].id}@0" for draw, place in enumerate(order)}
