"""Environments that read data: what they make of good rows, and what they say about bad ones."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tandem.envs.data.rows import read_file
from tandem.envs.dataset import Dataset
from tandem.envs.gsm8k import Gsm8k
from tandem.errors import ConfigError, EnvError
from tandem.rewards.math_verify import MathVerify
from tandem.types import Message, Rollout, Task


def jsonl(file: Path, *rows: Any) -> str:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def train(env: Dataset | Gsm8k) -> list[Task]:
    return list(env.tasks("train"))


def user_prompt(content: str, *before: Message) -> tuple[Message, ...]:
    return (*before, Message(role="user", content=content))


# gsm8k

EGGS = {
    "question": "Tom has 3 eggs and buys 4. How many?",
    "answer": "He has 3+4=<<3+4=7>>7 eggs.\n#### 7",
}
CLIPS = {"question": "May and Jo have 1,000 clips each. How many?", "answer": "2*1000=<<2*1000=2000>>2,000\n#### 2,000"}
COINS = {"question": "A coin is $5. What do 2 cost?", "answer": "5*2=<<5*2=10>>10\n#### 10"}


def test_gsm8k_reads_a_local_file(tmp_path: Path) -> None:
    env = Gsm8k(path=jsonl(tmp_path / "a.jsonl", EGGS, CLIPS, COINS), test_share=0.0, instruction="Be brief.")
    tasks = train(env)
    assert [task.id for task in tasks] == ["train/1", "train/2", "train/3"]
    assert [task.answer for task in tasks] == ["7", "2,000", "10"]
    assert tasks[0].prompt == user_prompt(EGGS["question"] + "\nBe brief.")
    assert env.check(tasks[0]) == f"This follows from what is asked: {EGGS['question']}\nHe has 3+4=7 eggs.\n#### 7"
    assert tasks[0].meta["question"] == EGGS["question"]


def test_gsm8k_pays_for_worked_answers_alone(tmp_path: Path) -> None:
    """With a bonus for the last line, training taught a small model to say that line and nothing else."""
    env = Gsm8k(path=jsonl(tmp_path / "a.jsonl", EGGS, COINS), test_share=0.0)
    assert list(env.default_rewards) == ["math_verify"]
    options = {key: value for key, value in env.default_rewards["math_verify"].items() if key != "weight"}
    reward = MathVerify(**options)
    eggs, coins = train(env)

    def earned(task: Task, reply: str) -> float:
        messages = (*task.prompt, Message(role="assistant", content=reply))
        return reward(Rollout(id="0/0", task=task, turns=(), messages=messages, status="ok"))

    assert earned(eggs, "#### 7") == 0.0
    assert earned(eggs, "7") == 0.0
    assert earned(eggs, "He has 3 eggs and buys 4, so 3 + 4 = 7.\n#### 8") == 0.0
    assert earned(eggs, "He has 3 eggs and buys 4, so 3 + 4 = 7.\n#### 7") == 1.0
    assert earned(coins, env.check(coins)) == 1.0, "its row says 5*2=10 and no more"


def test_gsm8k_row_without_marker_names_its_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", EGGS, {"question": "?", "answer": "seven"})
    with pytest.raises(EnvError, match=r"a\.jsonl:2: answer should end with '#### '.*'seven'"):
        train(Gsm8k(path=path))


# dataset: formats


def test_jsonl_with_bom_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\r\n  \n{"prompt": "b", "answer": 2, "n": [1]}')
    tasks = train(Dataset(path=str(file), test_share=0.0))
    assert [(task.id, task.prompt, task.answer) for task in tasks] == [
        ("train/1", user_prompt("a"), "1"),
        ("train/4", user_prompt("b"), "2"),
    ]
    assert tasks[1].meta == {"prompt": "b", "answer": 2, "n": [1]}


def test_csv_with_bom_quotes_and_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffprompt,answer\r\n"a, or\nb?","1,000"\r\n\r\nß?,2\r\n'.encode())
    tasks = train(Dataset(path=str(file), test_share=0.0))
    assert [(task.id, task.prompt, task.answer) for task in tasks] == [
        ("train/3", user_prompt("a, or\nb?"), "1,000"),
        ("train/5", user_prompt("ß?"), "2"),
    ]


def test_csv_has_numbers_as_the_datasets_library_reads_them(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    file = tmp_path / "a.csv"
    columns = {
        "whole": ["7", "+5", "007"],
        "gaps": ["1", "", "NA"],
        "decimal": ["1", "2.5", "-1e5"],
        "short": [" .5", "2. ", "3"],
        "mixed": ["1", "two", "3"],
        "thousands": ["1,000", "$5", "6"],
        "underscore": ["1_000", "2", "3"],
        "large": ["123456789012345678901234567890", "2", "3"],
    }
    lines = [tuple(columns), *zip(*columns.values(), strict=True)]
    file.write_text("".join(",".join(f'"{field}"' for field in line) + "\n" for line in lines))
    rows = [row.columns for row in read_file(str(file))]
    expected = pandas.read_csv(file)
    for name in columns:
        values = [None if pandas.isna(value) else value for value in expected[name].tolist()]
        assert [(type(row[name]), row[name]) for row in rows] == [(type(value), value) for value in values], name


NESTED = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": 2},
    "extra": {"in": {"n": 4}},
}


@pytest.mark.parametrize(
    ("options", "prompt", "answer"),
    [
        ({"answer": "reward_model.ground_truth"}, "1 + 1?", "2"),
        ({"answer": "extra.in.n", "prompt": "extra.in.n"}, "4", "4"),
        ({"answer": "", "prompt": "{extra.in.n} of {reward_model.ground_truth}"}, "4 of 2", ""),
    ],
)
def test_columns_within_columns(tmp_path: Path, options: dict[str, Any], prompt: str, answer: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", NESTED)
    (task,) = train(Dataset(path=path, test_share=0.0, **options))
    assert (task.prompt, task.answer) == (user_prompt(prompt), answer)


@pytest.mark.slow
def test_parquet(tmp_path: Path) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "day": [datetime.date(2024, 1, 2)] * 2})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    tasks = train(Dataset(path=str(tmp_path / "a.parquet"), test_share=0.0))
    assert [task.answer for task in tasks] == ["1", "2"]
    assert tasks[0].meta["day"] == "2024-01-02"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(EnvError, match=r"b\.parquet is not a readable Parquet file"):
        train(Dataset(path=str(tmp_path / "b.parquet")))


# dataset: prompts


def test_template_names_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"context": "It {rains}.", "question": "Wet?", "label": "yes"})
    env = Dataset(
        path=path, prompt="{context}\n\n{question}", answer="label", system="S", instruction="I", test_share=0
    )
    (task,) = train(env)
    assert task.prompt == user_prompt("It {rains}.\n\nWet?\nI", Message(role="system", content="S"))
    assert task.answer == "yes"
    assert env.check(task) == "yes"


def test_messages_column(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2+2"},
    ]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": talk})
    env = Dataset(path=path, answer="", system="S", instruction="I", test_share=0)
    (task,) = train(env)
    assert [(m.role, m.content) for m in task.prompt] == [
        ("system", "S"),
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "2+2\nI"),
    ]
    assert env.check(task) is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "should end with a user's message, got nothing"),
        ([{"role": "assistant", "content": "hi"}], "got an assistant's message"),
        (
            [{"role": "robot", "content": "hi"}],
            "role must be one of system, developer, user, assistant, tool, got .*'robot'",
        ),
        ([{"role": "user"}], "each with role and content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only text can be trained on"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "tool_calls .* a function's name"),
        ("", None),
        (None, "should hold text, got None"),
        (True, "should hold text, got True"),
        ({"text": "hi"}, "should hold text, got {"),
    ],
)
def test_malformed_prompts_name_the_line(tmp_path: Path, prompt: Any, message: str | None) -> None:
    env = Dataset(path=jsonl(tmp_path / "a.jsonl", {"prompt": "ok"}, {"prompt": prompt}), answer="", test_share=0)
    if message is None:
        assert len(train(env)) == 2
        return
    with pytest.raises(EnvError, match=message) as caught:
        train(env)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:2: ")
    assert "column 'prompt'" in str(caught.value)


def test_messages_keep_what_chat_templates_read(tmp_path: Path) -> None:
    """A table has null where a message lacks a field; arguments are JSON text in OpenAI's form."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "name": "ann", "content": "1 + 1", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "name": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    (task,) = train(Dataset(path=jsonl(tmp_path / "a.jsonl", {"prompt": talk}), answer="", test_share=0))
    read = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    assert [message.as_dict() for message in task.prompt] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": "1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": [read], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(("answer", "refused"), [("answer", True), ("", False), ("empty", False), ("q", False)])
def test_a_template_that_names_the_gold_answer_is_refused(tmp_path: Path, answer: str, refused: bool) -> None:
    """Not where the answer stands in the question itself."""
    path = jsonl(tmp_path / "a.jsonl", {"problem": "Is 2 even, 1 or 2?", "answer": "2", "empty": "", "q": "even"})
    env = Dataset(path=path, prompt="{problem} Put it within \\boxed{answer}.", answer=answer, test_share=0)
    with (
        pytest.raises(EnvError, match=r"a.jsonl:1: .*gold answer into the prompt: .*boxed2")
        if refused
        else nullcontext()
    ):
        assert train(env)[0].prompt[0].content == "Is 2 even, 1 or 2? Put it within \\boxed2."


def test_a_text_without_a_chat_is_the_whole_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"q": "1 + 1", "prompt": [{"role": "user", "content": "?"}], "answer": "2"})
    (task,) = train(Dataset(path=path, prompt="{q} =", chat=False, test_share=0))
    assert task.prompt == (Message(role="text", content="1 + 1 ="),)
    with pytest.raises(EnvError, match="should hold text, got"):
        train(Dataset(path=path, chat=False, test_share=0))


# dataset: mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b", ', r":2: not valid JSON: .* column 16 .*; each row must be one JSON object"),
        ('["b"]', ":2: each row must be one JSON object, got "),
        ('{"promt": "b", "answer": "1"}', ":2: no column 'prompt'; the row has: promt, answer"),
        ('{"prompt": "b"}', ":2: no column 'answer'; the row has: prompt"),
        ('{"prompt": "b", "answer": ["1"]}', ":2: column 'answer' should hold text, got .'1'."),
    ],
)
def test_malformed_row_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"}, line)
    with pytest.raises(EnvError, match=r"a\.jsonl" + message):
        train(Dataset(path=path, test_share=0.0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,answer\na,1\nb\n", r":3: expected as many fields as the header has \(prompt, answer\)"),
        ("a.csv", b'prompt,answer\n"a,1\n', r":\d: not valid CSV"),
        ("a.jsonl", b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff"}\n', r": not UTF-8 "),
        ("a.xlsx", b"", r" cannot be read; name one file that ends in \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EnvError, match=re.escape(name) + message):
        train(Dataset(path=str(tmp_path / name)))


def test_a_json_file_is_one_list_or_has_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"é {n}", "answer": str(n)} for n in range(3)]
    path = tmp_path / "a.json"
    read = []
    for text in (json.dumps(rows, indent=1), "\ufeff\n" + json.dumps(rows), "\n".join(map(json.dumps, rows))):
        path.write_text(text, encoding="utf-8")
        read.append(
            [(task.id, task.prompt[0].content, task.answer) for task in train(Dataset(path=str(path), test_share=0))]
        )
    assert read[0] == read[1] == read[2] == [(f"train/{n + 1}", f"é {n}", str(n)) for n in range(3)]
    for text, message in (
        ('[\n{"prompt": "a"},\n]', r"a\.json: not valid JSON: .* line [23] column \d+ .*; each row must be one"),
        ('[{"prompt": "a", "answer": "1"}, "b"]', r"a\.json: row 2: each row .* one JSON object, got 'b'"),
        ("[]", r"a\.json is empty"),
    ):
        path.write_text(text)
        with pytest.raises(EnvError, match=message):
            train(Dataset(path=str(path), test_share=0))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_data_set_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    for env in (Dataset(path=str(tmp_path / "a.jsonl")), Gsm8k(path=str(tmp_path / "a.jsonl"))):
        with pytest.raises(EnvError, match=r"a\.jsonl is empty; expected at least one row"):
            env.tasks("train")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"there is no file .*/tran\.jsonl; relative paths start at"):
        train(Dataset(path=str(tmp_path / "tran.jsonl")))


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_rows must be"):
        Dataset(path="a.jsonl", max_rows=0)
    assert set(Dataset(path="org/name", test_path="b.jsonl").inert()) == {"test_split", "test_share"}
    assert set(Dataset(path="a.jsonl", test_path="b.jsonl").inert()) == {
        "subset",
        "train_split",
        "test_split",
        "test_share",
    }


# dataset: splits, transforms, the hub


@pytest.fixture
def transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "row_changes.py").write_text(
        "def good(row):\n"
        "    return None if row['a'] == 2 else {'prompt': f\"What is {row['a']}?\", 'answer': str(row['a']), **row}\n"
        "def bad(row): return 1 / row['a']\n"
        "def wrong(row): return [row]\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "row_changes", raising=False)
    return jsonl(tmp_path / "a.jsonl", *({"a": n} for n in range(4)))


def test_transform_changes_rows_and_leaves_some_out(transforms: str) -> None:
    tasks = train(Dataset(path=transforms, transform="row_changes:good", test_share=0.0))
    assert [task.answer for task in tasks] == ["0", "1", "3"]
    assert tasks[0].prompt == user_prompt("What is 0?")
    assert tasks[0].meta["a"] == 0


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("row_changes:bad", r"a\.jsonl:1: transform row_changes:bad raised ZeroDivisionError"),
        ("row_changes:wrong", r"a\.jsonl:1: transform row_changes:wrong returned list, expected the row or None"),
        ("row_changes:number", "is a int, expected a function"),
        ("row_changes:missing", "cannot be imported"),
        ("no_such_module:fn", "cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_transform_mistakes(transforms: str, transform: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        train(Dataset(path=transforms, transform=transform, test_share=0.0))


@pytest.mark.slow
def test_hub_rows_come_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked_for = []

    def load(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        asked_for.append((name, subset, split))
        return [EGGS, CLIPS] if split == "train" else [COINS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    env = Gsm8k()
    assert [task.id for task in env.tasks("train")] == ["train/1", "train/2"]
    assert [task.answer for task in env.tasks("test")] == ["10"]
    assert asked_for == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    shared = Dataset(path="some/data", prompt="question", test_share=0.5)
    assert len(train(Dataset(path="some/data", prompt="question", test_share=0.0))) == 2
    assert shared.inert() == {}
    with pytest.raises(EnvError, match=r"some/data\[train\] row 1: no column 'prompt'"):
        train(Dataset(path="some/data"))


def test_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("tandem.hub.away", lambda: "")
    with pytest.raises(
        EnvError, match=r"'openai/gsm8k' \(subset main, split 'train'\) cannot be loaded: ConnectionError"
    ):
        Gsm8k().tasks("train")
    monkeypatch.setattr("tandem.hub.away", lambda: "the hub is away")
    with pytest.raises(EnvError, match="is not on this machine, and the hub is away; it is not a local file"):
        Gsm8k().tasks("train")


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvError, match=r"tandem-rl\[data\]"):
        Gsm8k().tasks("train")
