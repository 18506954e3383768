"""An Axolotl file's data sets as tasks, and its transforms and rewards called as Axolotl calls them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.envs.data import rows as data_rows
from tandem.errors import ConfigError, EnvError
from tandem.types import TEXT, Message
from tandem_compat.axolotl.datasets import AxolotlDatasets, TransformOptions
from tandem_compat.axolotl.options import DATASET
from tandem_compat.axolotl.rollout import RolloutFunction

Write = Callable[[str], str]

ASK = """
def ask(cfg, *args, **kwargs):
    def change(row):
        return {"prompt": [{"role": "user", "content": row["question"]}]}
    return change, {"remove_columns": ["question"]}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Make a module in the working directory; its name, which no other test uses, is returned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(text: str) -> str:
        name = f"axolotl_{tmp_path.name}_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return call


def rows(path: str, count: int, start: int = 0) -> str:
    """A file of questions and answers."""
    lines = [json.dumps({"question": f"{n}?", "answer": str(n), "extra": n}) for n in range(start, start + count)]
    Path(path).write_text("\n".join(lines))
    return path


def env(*datasets: dict[str, Any], **cfg: Any) -> AxolotlDatasets:
    return AxolotlDatasets(cfg={"base_model": "m", "datasets": list(datasets), **cfg})


def test_options_are_read_as_axolotl_reads_them() -> None:
    cfg = TransformOptions({"a": {"b": [{"c": 1}]}, "n": None})
    assert (cfg.a.b[0].c, cfg["a"]["b"][0]["c"], cfg.get("a").b[0].c) == (1, 1, 1)
    assert (cfg.none, cfg["none"], cfg.a.none, cfg.n) == (None,) * 4
    cfg.new = 3
    assert (cfg["new"], cfg.get("x", 5), "x" in cfg) == (3, 5, False)
    assert copy.deepcopy(cfg) == cfg == pickle.loads(pickle.dumps(cfg))


def test_a_transform_makes_prompts_and_keeps_columns(write: Write) -> None:
    task, *others = env({"path": rows("r.jsonl", 3), "type": f"{write(ASK)}.ask"}).tasks("train")
    assert [(m.role, m.content) for m in task.prompt] == [("user", "0?")]
    columns = {key: value for key, value in task.meta.items() if key != "prompt"}
    assert columns == {"answer": "0", "answers": "0", "extra": 0}  # by either name, as rewards of the documents ask
    assert (task.id, task.env, task.answer, len(others)) == ("train/1", "axolotl", "0", 2)
    assert env({"path": "r.jsonl", "type": f"{write(ASK)}.ask"}).check(task) is None


def test_numbers_of_a_csv_file_are_numbers(write: Write) -> None:
    Path("r.csv").write_text("question,answer,extra\n1?,7,0.5\n")
    (task,) = env({"path": "r.csv", "type": f"{write(ASK)}.ask"}).tasks("train")
    assert (task.answer, task.meta["answer"], task.meta["answers"], task.meta["extra"]) == ("7", 7, 7, 0.5)


def test_a_text_is_gone_on_with_and_messages_are_answered(write: Write) -> None:
    """TRL puts no chat template around a prompt that is a text."""
    name = write(
        "def ask(cfg):\n    return lambda row: {'prompt': row['question']}\n"
        "def chat(cfg):\n    return lambda row: {'prompt': [{'role': 'user', 'content': row['question']}]}\n"
    )
    path = rows("r.jsonl", 1)
    made = env(*({"path": path, "type": f"{name}.{kind}"} for kind in ("ask", "chat"))).tasks("train")
    assert [task.prompt for task in made] == [(Message(role=role, content="0?"),) for role in (TEXT, "user")]


def test_what_is_returned_lies_over_the_row(write: Write) -> None:
    """Also where it bears the name of a column that is removed."""
    name = write(
        "def ask(cfg):\n"
        "    change = lambda row: {'prompt': row['question'] + cfg.suffix, 'answer': cfg.none, 'extra': 'new'}\n"
        "    return change, {'remove_columns': ['extra', 'question'], 'num_proc': 2}\n"
    )
    task = env({"path": rows("r.jsonl", 1), "type": f"{name}.ask"}, suffix="!").tasks("train")[0]
    assert (task.prompt[0].content, task.meta["answer"], task.meta["extra"]) == ("0?!", None, "new")
    assert "question" not in task.meta


def test_every_column_may_be_removed(write: Write) -> None:
    name = write(
        "def ask(cfg):\n    return lambda row: {'prompt': row['question'], 'kept': 1}, {'remove_columns': '__all__'}\n"
    )
    task = env({"path": rows("r.jsonl", 1), "type": f"{name}.ask"}).tasks("train")[0]
    assert {key for key in task.meta if key != "prompt"} == {"kept"}


def test_a_transform_may_ask_for_the_tokenizer_and_its_number(write: Write, tiny_model: Path) -> None:
    name = write(
        "def ask(cfg, dataset_idx=None):\n    def change(row, tokenizer):\n"
        "        return {'prompt': f'{dataset_idx} {len(tokenizer)}'}\n    return change\n"
    )
    sets = [{"path": rows(f"{n}.jsonl", 1), "type": f"{name}.ask"} for n in range(2)]
    tasks = env(*sets, base_model=str(tiny_model)).tasks("train")
    assert [task.prompt[0].content for task in tasks] == ["0 259", "1 259"]


def test_sets_follow_each_other_without_a_transform(write: Write) -> None:
    write("")
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    made = env({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, {"path": "b.jsonl", "split": "train"})
    assert [(t.id, t.prompt[0].content) for t in made.tasks("train")] == [
        ("train/1", "a"),
        ("train/2", "b"),
        ("train/3", "b"),
    ]
    assert made.count("train") == 3


HUB = {"path": "owner/rows"}
LOCAL = {"path": "r.jsonl", "type": "own.ask"}
ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "path": (HUB, {"path": "owner/others"}),
    "name": (HUB, {**HUB, "name": "main"}),
    "split": (HUB, {**HUB, "split": "train[:9]"}),
    "type": (LOCAL, {**LOCAL, "type": "own.shout"}),
    "data_files": (
        {"path": "json", "data_files": ["r.jsonl"], "type": "own.ask"},
        {"path": "json", "data_files": ["s.jsonl"], "type": "own.ask"},
    ),
}
"""By option of an entry: two entries that differ in it."""


@pytest.mark.parametrize("option", ENTRIES)
def test_what_is_read_differs(option: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(ASK + "\ndef shout(cfg):\n    return lambda row: {'prompt': row['question'] + '!'}\n")
    rows("r.jsonl", 2), rows("s.jsonl", 2, 7)

    def read(*words: Any) -> Any:
        return iter([data_rows.DataRow(where="hub", number=1, columns={"prompt": f"{words}"})])

    monkeypatch.setattr(data_rows, "_read_hub", read)
    before, after = (
        [
            task.prompt[0].content
            for task in env({k: v.replace("own", name) if k == "type" else v for k, v in entry.items()}).tasks("train")
        ]
        for entry in ENTRIES[option]
    )
    assert before != after


def test_every_option_of_an_entry_is_tried() -> None:
    assert {name for name, option in DATASET.items() if option.becomes} - set(ENTRIES) == {"ds_type"}


def test_the_kind_that_a_files_name_says_is_taken(write: Write) -> None:
    write("")
    assert env({"path": rows("k.jsonl", 1), "ds_type": "json", "name": "main"}).count("train") == 1


@pytest.mark.parametrize(("size", "expected"), [(0.25, 10), (0.01, 1), (0.26, 11), (6, 6), (6.0, 6)])
def test_held_out_rows(size: float, expected: int, write: Write) -> None:
    """A share, rounded up as Axolotl does, or a number of rows; what is held out is not trained on."""
    made = env({"path": rows("r.jsonl", 40), "type": f"{write(ASK)}.ask"}, val_set_size=size)
    train, test = ({t.prompt[0].content for t in made.tasks(split)} for split in ("train", "test"))  # type: ignore[arg-type]
    assert train | test == {f"{n}?" for n in range(40)}
    assert len(test) == made.count("test") == expected
    assert len(train) == made.count("train") == 40 - expected


def test_equal_rows_are_held_out_together(write: Write) -> None:
    one = {"path": rows("r.jsonl", 6), "type": f"{write(ASK)}.ask"}
    made = env(one, one, val_set_size=1)
    assert [len({t.prompt[0].content for t in made.tasks(split)}) for split in ("train", "test")] == [5, 1]  # type: ignore[arg-type]


def test_a_set_of_its_own_is_held_out(write: Write) -> None:
    one = {"path": rows("r.jsonl", 40), "type": f"{write(ASK)}.ask"}
    own = env(one, test_datasets=[{**one, "path": rows("t.jsonl", 5, 1000)}], val_set_size=0)
    assert (len(own.tasks("train")), own.tasks("test")[0].prompt[0].content) == (40, "1000?")
    with pytest.raises(EnvError, match="40 of 40 rows held out"):
        env(one, val_set_size=40).tasks("train")
    with pytest.raises(EnvError, match="axolotl has no test tasks"):
        env(one).tasks("test")


def test_a_column_that_a_row_lacks_is_none(write: Write) -> None:
    """As in a table, for the transform within its set, and for rewards over all sets."""
    name = write("def ask(cfg):\n    return lambda row: {'prompt': f'{row[\"level\"]}'}\n")
    Path("r.jsonl").write_text('{"answer": "1", "level": 2}\n{"answer": "2"}\n')
    Path("s.jsonl").write_text('{"prompt": "p", "hint": "h"}\n')
    tasks = env({"path": "r.jsonl", "type": f"{name}.ask"}, {"path": "s.jsonl"}).tasks("train")
    assert [task.prompt[0].content for task in tasks] == ["2", "None", "p"]
    columns = [[task.meta[name] for name in ("answer", "level", "hint")] for task in tasks]
    assert columns == [["1", 2, None], ["2", None, None], [None, None, "h"]]


BROKEN = {
    "raises": ("def ask(cfg):\n    raise KeyError('x')\n", "ask raised KeyError: 'x'"),
    "returns nothing": ("def ask(cfg):\n    pass\n", "ask returned None, expected a function of a row"),
    "batched": ("def ask(cfg):\n    return (lambda row: row), {'batched': True}\n", "ask asks for batched; only"),
    "raises for a row": (
        "def ask(cfg):\n    return lambda row: row['none']\n",
        "r.jsonl:1: .* raised KeyError: 'none'",
    ),
    "makes no row": (
        "def ask(cfg):\n    return lambda row: 3\n",
        "r.jsonl:1: .* raised TypeError: .* not a mapping",
    ),
    "makes no prompt": ("def ask(cfg):\n    return lambda row: row\n", "r.jsonl:1: no column 'prompt'"),
    "is missing": ("", "has no attribute 'ask'"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_transform_is_named(how: str, write: Write) -> None:
    text, message = BROKEN[how]
    with pytest.raises(EnvError, match=message):
        env({"path": rows("r.jsonl", 1), "type": f"{write(text)}.ask"}).tasks("train")


@pytest.mark.parametrize("takes", ["model, processing_class, prompts, generation_config=None", "prompts, **others"])
def test_a_rollout_function_is_called_by_name(takes: str, write: Write) -> None:
    name = write(f"{ASK}\ndef play({takes}): ...\n")
    cfg = {"base_model": "m", "datasets": [{"path": rows("r.jsonl", 2), "type": f"{name}.ask"}]}
    assert len(RolloutFunction(cfg=cfg, rollout_func=f"{name}.play").tasks("train")) == 2


def test_a_rollout_function_that_is_not_there_is_seen_before_it_is_called(write: Write) -> None:
    cfg = {"base_model": "m", "datasets": [{"path": rows("r.jsonl", 1)}]}
    with pytest.raises(EnvError, match="has no attribute 'play'"):
        RolloutFunction(cfg=cfg, rollout_func=f"{write('')}.play").tasks("train")


def test_what_is_no_data_set_is_refused(write: Write) -> None:
    write("")
    rows("r.jsonl", 1)
    for entry, message in (
        ({}, "each entry needs a path"),
        ({"path": "json"}, "a name on the hub, or json and data_files"),
        ({"path": "r.jsonl", "split": "train[:9]"}, r"is a local file and has no split train\[:9\]"),
        ({"path": "r.jsonl", "ds_type": "csv"}, r"r\.jsonl is not read as ds_type csv"),
        ({"path": "r.jsonl", "ds_type": "text"}, r"r\.jsonl is not read as ds_type text"),
        ({"path": "r.jsonl", "type": "chatml"}, "type must be an import path"),
        ({"path": "r.jsonl", "type": {"field": 1}}, "type must be an import path"),
    ):
        with pytest.raises(ConfigError, match=message):
            env(entry)
    with pytest.raises(ConfigError, match=r"cfg\.datasets must be a list"):
        AxolotlDatasets(cfg={})
