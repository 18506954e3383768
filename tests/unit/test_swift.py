"""ms-swift's data, its verbs and its file of completions: what its arguments come to is in ``test_compat_golden``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.compat_cases import SWIFT, forget_swift, swift_package

from tandem.cli import app as cli
from tandem_compat import swift
from tandem_compat.commands import run as swift_command
from tandem_compat.commands.flags import repeated
from tandem_compat.swift.datasets import SwiftDataset, row
from tandem_compat.swift.options import RLHF

Run = Callable[..., tuple[int, str, str]]
COLOCATE = "--use_vllm true --vllm_mode colocate"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forget_swift(monkeypatch)
    swift_package(tmp_path)
    rows = [{"query": f"{i}+2=", "solution": str(i + 2)} for i in range(20)]
    Path("d.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_rows_in_every_form() -> None:
    question = {"role": "user", "content": "q"}
    reply = {"role": "assistant", "content": "a"}
    assert row({"messages": [question, reply]}) == {
        "messages": [question, reply], "prompt": [question], "solution": "a", "gold answer": "a",
    }  # fmt: skip
    for gold in (4, ["4", "four"], {"value": 4}):  # rewards get it as it is in the data
        parsed = row({"messages": [question], "solution": gold, "answer": "5"})
        assert (parsed["solution"], parsed["gold answer"]) == (gold, str(gold))
    assert row({"query": "q", "response": "a"})["prompt"] == [question]
    assert row({"query": "q", "response": "a"})["solution"] == "a"
    full = row({"query": "q", "history": [["q", "a"]], "system": "s", "answer": "x"})
    assert full["prompt"] == [{"role": "system", "content": "s"}, question, reply, question]
    assert full["solution"] == "x"
    assert row({"prompt": [question]})["gold answer"] == ""
    assert row({"messages": None, "prompt": "q"})["prompt"] == [question]  # of data that has both columns
    system = {"role": "system", "content": "s"}
    assert row({"messages": [question], "system": "s"})["prompt"] == [system, question]
    assert row({"query": "q", "system_prompt": "s"})["prompt"] == [system, question]
    assert row({"messages": [system, question], "system": "of another one"})["prompt"] == [system, question]
    for text in (json.dumps([question, reply]), str([question, reply])):  # of a CSV file
        assert row({"messages": text})["prompt"] == [question]
    assert row({"query": "q", "history": "[['q', 'a']]"})["prompt"] == [question, reply, question]
    alpaca = row({"instruction": "Say it.", "input": "q", "output": "a"})
    assert (alpaca["prompt"][0]["content"], alpaca["solution"]) == ("Say it.\nq", "a")
    assert row({"instruction": "q", "input": ""})["prompt"] == row({"instruction": "", "input": "q"})["prompt"]
    with pytest.raises(ValueError, match="its messages is text, and no list: 'q'"):
        row({"messages": "q"})
    with pytest.raises(ValueError, match="it has tools"):
        row({"query": "q", "tools": ["calculator"]})
    with pytest.raises(ValueError, match="it has images"):
        row({"query": "q", "images": ["a.png"]})
    with pytest.raises(ValueError, match="no messages"):
        row({"text": "q"})


def test_numbers_of_a_csv_file_are_numbers() -> None:
    Path("d.csv").write_text("query,solution,level\n1,7,0.5\n")
    (task,) = SwiftDataset(path="d.csv", test_share=0.0).tasks("train")
    assert (task.prompt[0].content, task.answer, task.meta["solution"], task.meta["level"]) == ("1", "7", 7, 0.5)


def test_rows_are_tasks_with_their_columns() -> None:
    (first, *_) = SwiftDataset(path="d.jsonl", test_share=0.0, max_rows=3).tasks("train")
    assert (first.prompt[0].content, first.answer, first.meta["query"]) == ("0+2=", "2", "0+2=")
    assert SwiftDataset(path="d.jsonl", test_share=0.0, gold_reply="<{answer}>").check(first) == "<2>"
    some = SwiftDataset(path="d.jsonl", test_share=0.5, max_rows=10)  # of which a share is held out
    used = sorted(int(task.meta["query"][:-3]) for split in ("train", "test") for task in some.tasks(split))
    assert used == list(range(10))
    Path("r.jsonl").write_text('{"ask": "1+1=", "gold": "2"}\n')
    (task,) = SwiftDataset(path="r.jsonl", columns={"ask": "query", "gold": "solution"}).tasks("train")
    assert (task.prompt[0].content, task.answer, task.meta["solution"]) == ("1+1=", "2", "2")


def test_a_column_that_a_row_lacks_is_null_for_rewards() -> None:
    """Rewards name their columns: without them they cannot be called, and ms-swift's rows all have the same."""
    Path("r.jsonl").write_text('{"query": "a", "tests": "t"}\n{"query": "b", "ask": "c"}\n')
    first, second = SwiftDataset(path="r.jsonl", columns={"ask": "level"}, test_share=0.0).tasks("train")
    assert [first.meta["tests"], first.meta["level"]] == ["t", None]
    assert [second.meta["tests"], second.meta["level"]] == [None, "c"]
    translation = swift.rlhf(
        {"model": ["m"], "dataset": ["d.jsonl", "r.jsonl"], "reward_funcs": ["accuracy"], "max_steps": ["1"],
         "gradient_accumulation_steps": ["8"]}, {},
    )  # fmt: skip
    envs = [each["env"] for each in translation.options["envs"].values()]
    assert [each.get("more_columns") for each in envs] == [["ask", "tests"], ["solution"]]


PLUGIN = """
from swift.plugin import ORM, orms
from swift.utils import get_logger


class Long(ORM):
    def __call__(self, completions, solution, **columns):
        return [len(text) + len(gold) for text, gold in zip(completions, solution)]


orms["long"] = Long
"""


# The command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(["swift", *arguments])
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


def test_values_of_one_argument_may_follow_one_another() -> None:
    assert repeated(["--dataset", "a", "b", "--beta", "1", "x=y"], RLHF) == [
        "--dataset", "a", "--dataset", "b", "--beta", "1", "x=y",
    ]  # fmt: skip
    assert repeated(["--stop_words", "a=b", "c", "seed=1"], RLHF) == [
        "--stop_words", "a=b", "--stop_words", "c", "seed=1",
    ]  # fmt: skip


def test_true_may_be_left_out() -> None:
    words = "--use_vllm --beta 1 --dynamic_sample false --overlong_filter seed=1 --async_generate"
    whole = "--use_vllm true --beta 1 --dynamic_sample false --overlong_filter true seed=1 --async_generate true"
    assert repeated(words.split(), RLHF) == whole.split()


def test_show_prints_the_recipe(run: Run) -> None:
    code, out, err = run("rlhf", *SWIFT.split(), "--reward_weights", "-1", "--sleep_level", "1", *COLOCATE.split(),
                         "--dtype", "float32", "--show", "seed=3")  # fmt: skip
    assert (code, err) == (0, "")
    recipe = yaml.safe_load(out)
    assert (recipe["seed"], recipe["dtype"], recipe["rewards"]["accuracy"]["weight"]) == (3, "float32", -1.0)
    assert "# --sleep_level: changes nothing: no second copy" in out
    code, out, _ = run("rollout", "--model", "m", "--show")
    assert (code, yaml.safe_load(out)["engine"]["port"]) == (0, 8000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "0"), "sampling.temperature"),
        (("--top_p", "1.5"), "sampling.top_p"),
        (("sampling.top_p=2",), "sampling.top_p"),
    ],
)
def test_show_refuses_what_a_run_would(run: Run, words: tuple[str, ...], message: str) -> None:
    refused = [run("rlhf", *SWIFT.split(), *words, *show) for show in ((), ("--show",))]
    for code, out, err in refused:
        assert (code, out) == (2, "")
        assert message in err


def test_a_system_message_that_cannot_be_read(run: Run) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    code, _, err = run("rlhf", *SWIFT.split(), "--system", "latin.txt", "--show")
    assert code == 2
    assert "--system: latin.txt cannot be read: 'utf-8' codec can't decode" in err


def test_a_misspelt_argument_is_corrected(run: Run) -> None:
    code, _, err = run("rlhf", *SWIFT.split(), "--num_generation", "4")
    assert code == 2
    assert "No such option: --num_generation" in err
    assert "--num_generations" in err.replace("--num_generation ", "")


@pytest.mark.slow
def test_it_trains_and_writes_completions(run: Run, tiny_model: Path) -> None:
    Path("plugin.py").write_text(PLUGIN)
    code, out, err = run(
        "rlhf", "--rlhf_type", "grpo", "--model", str(tiny_model), "--torch_dtype", "float32", "--dataset", "d.jsonl",
        "--external_plugins", "plugin.py", "--reward_funcs", "long", "accuracy", "format", "--num_generations", "4",
        "--gradient_accumulation_steps", "8", "--max_completion_length", "6", "--max_steps", "2", "--top_k", "-1",
        "--top_p", "1", "--output_dir", "out", "--run_name", "run", "--logging_steps", "1", "threads=1",
    )  # fmt: skip
    assert code == 0, err
    assert "done: out/run" in out
    assert "--logging_steps: changes nothing: every step is written down" in err
    table = [json.loads(line) for line in Path("out/run/completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in table] == [["1"] * 8, ["2"] * 8]
    for line in table:
        assert set(line) == {"step", "prompt", "completion", "long", "accuracy", "format", "advantages"}
        assert all("+2=" in prompt and "<|im_start|>" in prompt for prompt in line["prompt"])
        golds = [str(int(prompt.partition("+2=")[0].rpartition("\n")[2]) + 2) for prompt in line["prompt"]]
        sizes = [len(text) + len(gold) for text, gold in zip(line["completion"], golds, strict=True)]
        assert line["long"] == sizes


# Several hosts


def test_several_hosts_are_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ms-swift does: the same command line on every host, told apart by NODE_RANK."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["tandem", "swift", "rlhf", "--model", "m"])
    hosts = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    swift_command.start_ranks(hosts)
    assert started == [
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=4", "--node_rank=1",
         "--master_addr=h", "--master_port=29500", "-m", "tandem", "swift", "rlhf", "--model", "m"]
    ]  # fmt: skip
    swift_command.start_ranks(hosts | {"WORLD_SIZE": "2", "RANK": "1"})  # a platform's, which numbers hosts
    assert started.pop() == started[0]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for environ in ({}, {"NNODES": "1", "NPROC_PER_NODE": "4"}, hosts | rank):
        swift_command.start_ranks(environ)
    assert len(started) == 1
