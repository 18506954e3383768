"""Rewards by ms-swift's names and of its plug-in files: what they are given, and what they come to."""

from __future__ import annotations

import asyncio
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.compat_cases import forget_swift, swift_package

from tandem.config.loading import from_options
from tandem.errors import ConfigError, RewardError
from tandem.rewards.base import Reward
from tandem.rewards.grading.workers import Graders
from tandem.types import Completion, Message, Rollout, Task, Turn
from tandem_compat import swift
from tandem_compat.commands.flags import repeated
from tandem_compat.swift.datasets import SwiftDataset
from tandem_compat.swift.options import RLHF
from tandem_compat.swift.plugin import PluginReward
from tandem_compat.swift.rewards import SwiftFormat, SwiftSoftOverlong


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forget_swift(monkeypatch)
    swift_package(tmp_path)


def write(text: str, name: str = "plugin.py") -> None:
    Path(name).write_text(textwrap.dedent(text))


def plugin(text: str, registered: str = "mine", **arguments: Any) -> PluginReward:
    write(text)
    return PluginReward(registered=registered, files=("plugin.py",), arguments=arguments)


def played(task: Task, *replies: str, tokens: int = 2, finish: Any = "stop") -> list[Rollout]:
    """Siblings with those replies, each of so many tokens."""
    rollouts = []
    for i, reply in enumerate(replies):
        ids = tuple(range(10 * i, 10 * i + tokens))
        completion = Completion(tokens=ids, logprobs=(0.0,) * tokens, versions=(0,) * tokens, finish=finish)
        rollouts.append(
            Rollout(
                id=f"g/{i}",
                task=task,
                turns=(Turn(prompt=(1,), completion=completion, temperature=1.0),),
                messages=(*task.prompt, Message(role="assistant", content=reply)),
                status="ok",
            )
        )
    return rollouts


def rollouts_of(*replies: str, tokens: int = 2) -> list[Rollout]:
    prompt = (Message(role="user", content="3+4="),)
    return played(Task(id="t", env="e", prompt=prompt, answer="7", meta={"solution": "7"}), *replies, tokens=tokens)


def graded(reward: Reward, rollouts: list[Rollout]) -> list[float | None]:
    """What it gives in a grading process."""

    async def grade() -> list[Rollout]:
        async with Graders({"mine": (reward, 1.0)}, timeout=60.0) as graders:
            return await graders.grade(rollouts)

    results = asyncio.run(grade())
    assert [rollout.error for rollout in results] == [""] * len(results)
    return [rollout.reward for rollout in results]


def recipe(line: str) -> dict[str, Any]:
    return swift.rlhf(words(line), {}).options


def words(line: str) -> dict[str, list[str]]:
    Path("d.jsonl").write_text('{"query": "3+4=", "solution": "7"}\n')
    start = "--model m --dataset d.jsonl --gradient_accumulation_steps 8 --max_steps 2 "
    flags: dict[str, list[str]] = {}
    parts = repeated((start + line).split(), RLHF)
    for flag, value in zip(parts[::2], parts[1::2], strict=True):
        flags.setdefault(flag.removeprefix("--"), []).append(value)
    return flags


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as refused:
        recipe(line)
    return str(refused.value)


# What a plug-in's reward is given

COLUMNS = """
    from swift.rewards import ORM, orms

    class Mine(ORM):
        def __call__(self, completions, solution, messages, **columns):
            assert [turns[-1] for turns in messages] == [{"role": "assistant", "content": c} for c in completions]
            assert all(turns[0]["content"] == "Be brief." and len(turns) == 3 for turns in messages)
            assert columns["response_token_ids"] == [[0, 1], [10, 11]]
            assert (columns["finish_reason"], columns["is_truncated"]) == (["length"] * 2, [True] * 2)
            assert (columns["request_id"], columns["rollout_infos"]) == (["g/0", "g/1"], [{"num_turns": 1}] * 2)
            assert columns["kind"] == ["sum", "sum"]
            return [float(turns[-1]["content"] == gold) for turns, gold in zip(messages, solution)]

    orms["mine"] = Mine
"""


@pytest.mark.parametrize(
    "row",
    [
        {"query": "3+4=", "system": "Be brief.", "solution": "7"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="},
                      {"role": "assistant", "content": "7"}]},
    ],
    ids=["query", "messages"],
)  # fmt: skip
def test_the_conversation_ends_with_the_completion(row: dict[str, Any]) -> None:
    """The answer in the data is not among what was said, or it would be the answer that is judged."""
    Path("rows.jsonl").write_text(json.dumps(row | {"kind": "sum"}) + "\n")
    (task,) = SwiftDataset(path="rows.jsonl", test_share=0.0).tasks("train")
    assert graded(plugin(COLUMNS), played(task, "6", "7", finish="length")) == [0.0, 1.0]


def test_a_gold_answer_that_is_no_text_reaches_rewards_as_it_is() -> None:
    Path("rows.jsonl").write_text('{"query": "3+4=", "solution": ["7", "seven"]}\n')
    (task,) = SwiftDataset(path="rows.jsonl", test_share=0.0).tasks("train")
    mine = plugin("""
        from swift.rewards import orms
        orms["mine"] = lambda completions, solution, **columns: [
            float(text in golds) for text, golds in zip(completions, solution)]
    """)
    assert graded(mine, played(task, "seven", "[")) == [1.0, 0.0]


def test_completions_come_first_whatever_they_are_called_and_calls_may_wait() -> None:
    mine = plugin("""
        from swift.plugin import AsyncORM, orms

        class Mine(AsyncORM):
            async def __call__(self, texts, solution):
                return [float(text == gold) for text, gold in zip(texts, solution)]

        orms["mine"] = Mine
    """)
    assert mine.called().is_async
    assert graded(mine, rollouts_of("7", "6")) == [1.0, 0.0]


def test_a_class_gets_the_arguments() -> None:
    text = """
        from swift.rewards import ORM, orms

        class Mine(ORM):
            def __init__(self, args, cosine_max_len, seed, other=4, **kwargs):
                super().__init__(args, **kwargs)
                self.seen = [args.seed, args.max_completion_length, cosine_max_len, args.soft_max_length,
                             args.output_dir, args.dtype, other, getattr(args, "nothing", None), seed]
            def __call__(self, completions, **columns): return self.seen

        class Bare:
            def __call__(self, completions, **columns): return [1.0]

        class Old(ORM):
            def __init__(self): self.it = 2.0
            def __call__(self, completions, **columns): return [self.it]

        orms |= {"mine": Mine, "bare": Bare, "old": Old, "plain": lambda completions, **columns: [3.0]}
    """
    seen = plugin(text, seed=7, model="org/m").called().call(completions=["a"])
    assert seen == [7, 512, 512, 512, "output/m", "bfloat16", 4, None, 7]
    for name, score in {"bare": 1.0, "old": 2.0, "plain": 3.0}.items():
        assert PluginReward(registered=name, files=("plugin.py",)).called().call(completions=["a"]) == [score]
    options = recipe("--reward_funcs mine --external_plugins plugin.py --seed 9")
    assert options["rewards"]["mine"]["arguments"]["seed"] == 9


def test_a_file_is_run_once() -> None:
    text = """
        from swift.plugin import orms
        with open("runs.txt", "a") as runs: runs.write("run ")
        def one(completions, **columns): return [1.0]
        orms["one"] = one
        orms["two"] = one
    """
    for name in ("one", "two"):
        reward = plugin(text, name)
        reward.prepare()
        reward.called()
    assert Path("runs.txt").read_text() == "run "


# What plug-ins import


def test_a_plug_in_of_ms_swift_says_that_it_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree("swift")
    text = "from swift.plugin import orms\norms['mine'] = lambda completions, **_: [1.0]\n"
    message = r"plugin\.py imports ms-swift, which is not installed here; install it \(pip install ms-swift\), or write"
    with pytest.raises(RewardError, match=message):
        plugin(text).prepare()
    with pytest.raises(ConfigError, match=f"--external_plugins: {message}"):
        recipe("--reward_funcs mine --external_plugins plugin.py")


@pytest.mark.slow
def test_what_a_release_of_ms_swift_lacks_is_named() -> None:
    """By a grading process, which finds modules in the working directory."""
    text = "from swift.rewards import orms\norms['mine'] = lambda completions, **_: [5.0]\n"
    mine = plugin(text)
    assert graded(mine, rollouts_of("7")) == [5.0]
    write("from swift.llm import PtEngine\n" + text)

    async def start() -> None:
        async with Graders({"mine": (mine, 1.0)}):
            return

    with pytest.raises(RewardError, match=r"No module named 'swift\.llm'"):
        asyncio.run(start())


# What a command line comes to


def test_a_plug_in_comes_before_what_is_built_in() -> None:
    write("""
        from swift.plugin import orms
        orms["format"] = lambda completions, **columns: [7.0] * len(completions)
    """)
    rewards = recipe("--external_plugins plugin.py --reward_funcs accuracy format")["rewards"]
    assert rewards["accuracy"]["kind"] == "math_verify"
    assert (rewards["format"]["registered"], rewards["format"]["files"]) == ("format", ["plugin.py"])
    config = from_options(recipe("--external_plugins plugin.py --reward_funcs format"), (), Path("x")).config
    assert graded(config.rewards["format"].reward, rollouts_of("anything")) == [7.0]


def test_mistakes_in_plug_ins_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    write("import nowhere_to_be_found\n", "broken.py")
    write("from swift.plugin import orms\nprint('hello')\norms['mine'] = lambda completions, **_: []\n")
    one = "--reward_funcs mine --external_plugins"
    assert "--external_plugins: there is no plug-in file nothere.py" in refusal(f"{one} nothere.py")
    broken = refusal(f"{one} broken.py")
    assert "--external_plugins: running broken.py raised ModuleNotFoundError: No module named 'nowhere" in broken
    assert "broken.py:1 in <module>" in broken
    write("x = 1\n", "unused.py")
    recipe(f"{one} plugin.py unused.py")  # which is told
    assert "there is no 'other'; choose from accuracy" in refusal(f"{one} plugin.py --reward_funcs other mine")
    capsys.readouterr()
    recipe("--reward_funcs mine --external_plugins ./plugin.py")
    assert capsys.readouterr().out == ""  # a recipe is what is printed there


def test_a_reward_of_a_recipe_that_no_file_registers() -> None:
    with pytest.raises(RewardError, match="no reward 'other'; in orms is: mine"):
        plugin("from swift.plugin import orms\norms['mine'] = len\n", "other").prepare()
    with pytest.raises(RewardError, match=r"there is no plug-in file none\.py"):
        PluginReward(registered="mine", files=("none.py",)).prepare()


# Built-in rewards


@pytest.mark.parametrize(
    ("reply", "score"),
    {
        "<think>a\nb</think>\n <answer>c\nd</answer>": 1.0,
        "<think></think><answer></answer>": 1.0,
        "<think>a</think><answer>b</answer>\n": 0.0,
        "\n<think>a</think><answer>b</answer>": 0.0,
        "a\n<think>a</think><answer>b</answer>": 0.0,
        "<think>a</think> so <answer>b</answer>": 0.0,
        "<think>a</think><answer>b</answer>.": 0.0,
        "<think>a</think></think><answer>b</answer></answer>": 1.0,
        "<answer>b</answer>": 0.0,
    }.items(),
)
def test_format_is_to_the_character(reply: str, score: float) -> None:
    assert SwiftFormat()(rollouts_of(reply)[0]) == score


def test_soft_overlong_goes_on_beyond_the_limit() -> None:
    reward = SwiftSoftOverlong(max_tokens=8, cache=4)
    scores = {tokens: reward(rollouts_of("a", tokens=tokens)[0]) for tokens in (1, 4, 5, 8, 12)}
    assert scores == {1: 0.0, 4: 0.0, 5: -0.25, 8: -1.0, 12: -2.0}
    assert reward.full_marks is None


def test_built_in_rewards_by_name() -> None:
    options = recipe("--reward_funcs format soft_overlong --soft_cache_length 20")
    config = from_options(options, (), Path("x")).config
    assert config.rewards["format"].reward == SwiftFormat()
    assert config.rewards["soft_overlong"].reward == SwiftSoftOverlong(max_tokens=512, cache=20)
    assert SwiftFormat()(rollouts_of(options["env"]["gold_reply"].replace("{answer}", "7"))[0]) == 1.0
