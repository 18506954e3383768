"""``import tandem``: its names, their examples, and runs from ordinary code and from a notebook's cell."""

from __future__ import annotations

import _thread
import asyncio
import doctest
import importlib
import linecache
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import ConfigError, Interrupted
from tandem.observability import progress

NAMES = [name for name in tandem.__all__ if not name.startswith("__")]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGE = Path(__file__).parents[2] / "docs/guide/python.md"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Consoles that other tests of this process left open print nothing here, and modules made here are no others'."""
    monkeypatch.setattr(progress, "_listeners", [])
    yield
    for name, module in tuple(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two quick steps in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "model": str(tiny_model),
        "env": {"kind": "arithmetic", "max_number": 9},
        "steps": 2,
        "groups_per_step": 2,
        "group_size": 2,
        "dtype": "float32",
        "sampling": {"max_tokens": 4},
        "zero_variance_groups": "keep",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
        "name": "a",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *NAMES])
def test_the_example_of_every_public_name_runs(
    name: str, recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documented = getattr(tandem, name) if name else tandem
    text = (documented.__doc__ or "").replace(MODEL, recipe["model"])
    assert "Example:" in text, f"{name} has no example in its docstring"
    example = doctest.DocTestParser().get_doctest(text, {"__name__": "examples"}, name, None, 0)
    sys.modules["examples"] = type(sys)("examples")  # a dataclass looks for its module
    try:
        failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed
    finally:
        del sys.modules["examples"]
    assert example.examples
    assert not failed, capsys.readouterr().out


@pytest.mark.slow
def test_import_loads_nothing_and_each_name_only_its_own() -> None:
    code = (
        "import sys, tandem\n"
        "assert not [m for m in sys.modules if m.startswith('tandem.')]\n"
        "assert set(tandem.__all__) <= set(dir(tandem))\n"
        "tandem.Task, tandem.Environment, tandem.Reward, tandem.Recipe, tandem.Run, tandem.train\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(AttributeError, match="'trian'; its names: train, evaluate, compare, Run"):
        tandem.trian  # noqa: B018


@pytest.mark.slow
def test_a_cell_trains_beside_the_loop_of_its_notebook(recipe: dict[str, Any]) -> None:
    seen: list[tuple[int, float]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        seen.append((step, metrics["reward"]))

    async def cell() -> tandem.Run:
        return tandem.train(recipe, on_step=on_step)

    run = asyncio.run(cell())
    assert run.status == "finished"
    assert seen == list(zip(run.metrics.column("step"), run.metrics.column("reward"), strict=True))
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert {rollout["step"] for rollout in run.rollouts(2)} == {2}
    assert run.weights(2).is_dir()
    with pytest.raises(tandem.TandemError, match="no rollouts of step 7; there are those of steps 1 to 2"):
        run.rollouts(7)
    assert tandem.evaluate(run, {"evaluate.tasks": 2, "evaluate.samples": 2})["tasks"] == 2


def notebooks(cell: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine as a notebook does: unlike asyncio.run, it leaves Ctrl-C to Python."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell)
    finally:
        loop.close()


@pytest.mark.slow
def test_a_run_is_looked_at_talked_to_measured_and_compared(recipe: dict[str, Any]) -> None:
    first = tandem.train(recipe, {"evaluate.tasks": 3, "evaluate.samples": 2})
    second = tandem.train(first.recipe, {"name": "b", "optimizer.lr": 0.01})
    assert first.rollouts() == first.rollouts(2)
    assert "srcdoc" in first.report()._repr_html_()
    assert [len(axes.get_lines()) for axes in tandem.compare(first, second).plot("reward", "length").axes] == [2, 2]
    assert isinstance(first.chat("What is 1 + 1?").after, str)
    assert first.eval("countdown", {"evaluate.tasks": 2})["env"] == "countdown"
    compared = tandem.compare(first, "runs/b")
    assert compared.differences == {"optimizer.lr": ("1e-06", "0.01")}
    assert re.search(r"[+-]0\.\d+ \[.*\] paired: \d tasks better, \d worse", str(compared))
    with pytest.raises(tandem.TandemError, match="'lenght'; did you mean 'length'"):
        first.plot("lenght")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": 1e-5}, "unknown option 'learning_rate'; from TRL.*here it is optimizer.lr"),
        ({"epochs": 1}, "epochs and steps both say how long it trains"),
    ],
)
def test_an_option_that_is_not_tandems_is_named(recipe: dict[str, Any], options: Any, says: str) -> None:
    with pytest.raises(tandem.TandemError, match=says):
        tandem.train(**recipe, **options)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [notebooks, asyncio.run])
def test_the_stop_button_ends_a_run_in_order_and_it_goes_on(
    recipe: dict[str, Any], runs: Callable[[Coroutine[Any, Any, Any]], None]
) -> None:
    def pressed(step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:  # once: a second time would end the run at once
            _thread.interrupt_main()

    async def cell() -> tandem.Run:
        return tandem.train(recipe, {"steps": 100}, on_step=pressed)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match="everything is saved"):
            runs(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    run = tandem.Run.open("runs/a")
    stopped = run.metrics[-1]["step"]
    assert run.status == "interrupted"
    assert stopped < 100
    assert run.resume({"steps": int(stopped) + 1}).metrics[-1]["step"] == stopped + 1


@pytest.mark.slow
def test_what_on_step_raises_ends_the_run(recipe: dict[str, Any]) -> None:
    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tandem.train(recipe, on_step=on_step)
    run = tandem.Run.open("runs/a")
    assert (run.status, len(run.metrics)) == ("failed", 1)


@pytest.mark.slow
def test_a_process_trains_one_run_at_a_time(recipe: dict[str, Any]) -> None:
    refused: list[str] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        with pytest.raises(tandem.TandemError, match="a process trains one at a time") as caught:
            tandem.train({**recipe, "name": "b"})
        refused.append(str(caught.value))

    assert tandem.train(recipe, {"steps": 1}, on_step=on_step).status == "finished"
    assert len(refused) == 1
    assert not Path("runs/b").exists()


def test_an_async_on_step_is_refused_before_anything_is_loaded(recipe: dict[str, Any]) -> None:
    async def on_step(step: int, metrics: Mapping[str, float]) -> None: ...

    with pytest.raises(tandem.TandemError, match="write it as a plain def"):
        tandem.train(recipe, on_step=on_step)  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_a_run_is_looked_at_from_any_working_directory(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(str(tandem.Recipe.load(recipe)))
    run = tandem.Run.open("runs/a")
    monkeypatch.chdir(tmp_path.parent)
    assert run.folder == tmp_path / folder
    assert (run.status, len(run.metrics)) == ("not started", 0)


def test_a_module_that_was_edited_and_reloaded_has_its_new_part(recipe: dict[str, Any], tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\n"
        "from tandem.envs.arithmetic import Arithmetic\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Edited(Arithmetic):\n"
        "    largest: int = 1\n"
    )
    (tmp_path / "edited_parts.py").write_text(source)
    import edited_parts  # type: ignore[import-not-found]

    before = tandem.Recipe.load({**recipe, "env": {"kind": edited_parts.Edited}})
    (tmp_path / "edited_parts.py").write_text(source + "    smallest: int = 0\n")
    importlib.reload(edited_parts)
    after = tandem.Recipe.load({**recipe, "env": {"kind": edited_parts.Edited, "smallest": -5}})
    assert "smallest" not in before.options["env"]
    assert after.options["env"]["smallest"] == -5


def test_parts_of_ones_own_are_named_by_what_they_are(recipe: dict[str, Any], tmp_path: Path) -> None:
    source = "def brief(rollout):\n    return float(len(rollout.text) < 3)\n"
    (tmp_path / "public_parts.py").write_text(source)
    import public_parts  # type: ignore[import-not-found]

    loaded = tandem.Recipe.load({**recipe, "rewards": {"brief": {"kind": public_parts.brief, "weight": 0.5}}})
    assert loaded.options["rewards"] == {"brief": {"kind": "public_parts:brief", "weight": 0.5}}

    def inner(rollout: Any) -> float:
        return 0.0

    loaded = tandem.Recipe.load({**recipe, "rewards": {"inner": {"kind": inner, "weight": 1.0}}})
    assert re.fullmatch(r"inner_[0-9a-f]{12}:inner", loaded.options["rewards"]["inner"]["kind"])
    assert repr(loaded) == "<Recipe: tiny on arithmetic, 2 steps of 2 x 2 answers>"


def test_a_sequence_of_tasks_need_not_take_slices(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "public_tasks.py").write_text(
        "from dataclasses import dataclass\n"
        "from tandem.envs.arithmetic import Arithmetic\n\n"
        "class OneByOne:\n"
        "    def __init__(self, tasks): self.tasks = tasks\n"
        "    def __len__(self): return len(self.tasks)\n"
        "    def __getitem__(self, index): return self.tasks[int(index)]\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Lazy(Arithmetic):\n"
        "    def tasks(self, split): return OneByOne(super().tasks(split))\n"
    )
    changed = {"env": "public_tasks:Lazy", "evaluate": {"tasks": 3, "samples": 1}}
    assert tandem.evaluate({**recipe, **changed})["tasks"] == 3


def test_what_is_no_recipe_is_refused_by_its_type(recipe: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not a Run; that of a run is run\.recipe"):
        tandem.train(tandem.Run(Path("runs/a")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt": ({"role": "user", "content": "?"},)}, "task 7 must be messages, such as .*not a dict"),
        ({"prompt": "What is 3 + 4?"}, "task 7 must be messages, such as .*not a str"),
        ({"answer": 7}, "the answer of task 7 must be a text, which may be empty, not a int"),
        ({"answer": None}, "the answer of task 7 must be a text, which may be empty, not a NoneType"),
    ],
)
def test_a_task_is_made_of_messages_and_text(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        tandem.Task(**{"id": "7", "env": "sums", "prompt": (), "answer": "7", **wrong})
    with pytest.raises(TypeError, match="the content of a message must be a text, not a NoneType"):
        tandem.Message(role="user", content=None)  # type: ignore[arg-type]


def test_a_recipe_is_loaded_from_a_file_a_mapping_and_another_recipe(recipe: dict[str, Any], tmp_path: Path) -> None:
    from_mapping = tandem.Recipe.load(recipe, {"optimizer.lr": 1e-5, "name": "b: c", "context": None})
    (tmp_path / "recipe.yaml").write_text(str(from_mapping))
    from_file = tandem.Recipe.load(tmp_path / "recipe.yaml")
    from_recipe = tandem.Recipe.load(from_file, ["group_size=4"])
    assert from_mapping.options == from_file.options
    assert from_file.options["name"] == "b: c"
    assert (from_recipe.options["group_size"], from_recipe.options["optimizer"]["lr"]) == (4, 1e-5)
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        tandem.Recipe.load(recipe, {"group_sise": 4})
    with pytest.raises(ConfigError, match="not one text"):
        tandem.Recipe.load(recipe, "group_size=4")


def test_a_recipe_takes_numbers_of_numpy_and_refuses_what_no_file_can_hold(recipe: dict[str, Any]) -> None:
    numbers = {"optimizer": {"lr": np.float64(1e-5)}, "steps": np.int64(3)}
    overrides = {"optimizer.lr": np.float64(1e-5), "steps": np.int64(3)}
    assert tandem.Recipe.load({**recipe, **numbers}) == tandem.Recipe.load(recipe, overrides)
    assert type(tandem.Recipe.load({**recipe, **numbers}).config.optimizer.lr) is float
    with pytest.raises(ConfigError, match=r"cannot hold a Arithmetic: .* mapping of its class and options"):
        tandem.Recipe.load({**recipe, "env": Arithmetic()})
    with pytest.raises(ConfigError, match="cannot hold a set"):
        tandem.Recipe.load(recipe, {"loggers": {"console"}})


def test_a_table_says_which_columns_it_lacks() -> None:
    table = tandem.MetricsTable([{"step": 1, "time": 0.0, "metrics": {"reward": None}}])
    assert str(table.column("reward")) == "[nan]"
    with pytest.raises(tandem.TandemError, match="'rewards'; did you mean 'reward'"):
        table.column("rewards")
    assert list(tandem.MetricsTable([]).to_pandas().index) == []


@pytest.mark.slow
def test_the_page_for_notebooks_runs_from_top_to_bottom(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell by cell beside a running loop, with a tiny model and few, short answers."""
    quick = {
        "steps": 2,
        "groups_per_step": 2,
        "group_size": 2,
        "sampling.max_tokens": 4,
        "zero_variance_groups": "keep",
    }
    load = tandem.Recipe.load
    monkeypatch.setattr(tandem.Recipe, "load", lambda source, overrides=(): load(source, {**dict(overrides), **quick}))
    cells = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def notebook() -> None:
        for cell in cells:
            first, _, rest = cell.partition("\n")
            if file := re.fullmatch(r"# %%writefile (\S+)", first):
                (tmp_path / file[1]).write_text(rest)
            else:
                text, file = cell.replace(MODEL, recipe["model"]).replace("42", "3"), f"<cell {cells.index(cell)}>"
                linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # as notebooks do
                exec(compile(text, file, "exec"), names)

    asyncio.run(notebook())
    assert len(cells) >= 9
    assert names["run"].status == "finished"
    assert names["recipe"].options["rewards"]["brief"]["kind"] == "my_rewards:brief"
