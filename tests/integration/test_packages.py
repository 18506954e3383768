"""Environments and agents of other packages, as they are on the registry, are played and trained by Tandem."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.atropos_peers import packages_python, until
from integration.test_verifiers import call, group, served, trained, with_tools
from support.fake_engine import END

from tandem.agents import server
from tandem.envs import _package
from tandem.envs.mcp import Mcp
from tandem.envs.openenv import OpenEnv
from tandem.errors import ConfigError, EnvError
from tandem.types import Group

pytestmark = pytest.mark.slow  # each imports a package in a process of its own
ROOT = Path(__file__).parents[2]
CAPITALS = {"path": str(ROOT / "recipes/data/capitals.jsonl"), "prompt": "Capital of {country}?", "answer": "capital"}
SERVER = {"command": "python", "args": [str(ROOT / "recipes/words_server.py")]}


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter that has the packages; the recipes' modules are found as a recipe's are."""
    monkeypatch.chdir(ROOT / "tests/support")
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    return str(packages_python())


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tools(tmp_path_factory.mktemp("tools"))


ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "textarena": {"kind": "textarena", "id": "GuessTheNumber-v0-raw", "args": {"max_turns": 2}, "max_turns": 3},
    "gymnasium": {"kind": "gymnasium", "id": "vowels_env:Vowels-v0"},
    "openenv": {
        "kind": "openenv",
        "command": f"python {ROOT / 'recipes/say_server.py'} {{port}}",
        "observation": "prompt",
        "concurrency": 4,
    },
    "mcp": {"kind": "mcp", **CAPITALS, "servers": [SERVER], "max_turns": 2},
    **{
        f"{name}_agent": {"kind": "agent", "agent": f"{name}_agent:solve", **CAPITALS}
        for name in ("openai", "langgraph", "pydantic")
    },
    "cli_agent": {"kind": "agent", "agent": f"PYTHON {ROOT / 'recipes/cli_agent.py'}", **CAPITALS},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_package_trains_unchanged(name: str, python: str, tools: Path, tmp_path: Path, long: bool) -> None:
    steps = 20 if long else 2
    env = {**ENVIRONMENTS[name], "python": python}
    if name == "cli_agent":
        env["agent"] = env["agent"].replace("PYTHON", env.pop("python"))
    more: dict[str, Any] = {"group_size": 2, "evaluate": {"tasks": 0}, "sampling": {"max_tokens": 24}}
    if name == "mcp" or name.endswith("agent"):
        more["rewards"] = {"support.vowels:share": 1.0}
    # A random model never makes a valid move of a game.
    run = trained(tools, tmp_path, env=env, steps=steps, zero_variance_groups="keep", **more)
    last = run.metrics[steps - 1]
    assert last["rollouts/failed"] == 0.0
    kind = env["kind"]
    assert last[f"env/{kind}/trained"] == 2.0


def test_parallel_branches_of_an_agent_are_one_rollout_of_several_conversations(python: str, tools: Path) -> None:
    from tandem.envs.agent import Agent

    env = Agent(agent="langgraph_agent:solve", python=python, **CAPITALS)
    (rollout,) = played(env, tools, [64, END], [65, END], [66, 67, END], size=1).rollouts
    assert rollout.status == "ok", rollout.error
    first, second, last = rollout.turns
    assert first.prompt != second.prompt
    assert not any(turn.prompt[: len(first.prompt)] == first.prompt for turn in (second, last))
    assert rollout.messages[-1].content == "cd"


def played(env: Any, folder: Path, *answers: list[int], size: int = 2) -> Group:
    return group(env, folder, *answers, size=size, reward="support.vowels:share")


@pytest.fixture
def over_http(python: str) -> Iterator[dict[str, Any]]:
    """The MCP server at a URL."""
    with served(python, str(ROOT / "recipes/words_server.py")) as url:
        yield {"url": f"{url}/mcp"}


@pytest.mark.parametrize("way", ["streams", "http"])
def test_a_tool_of_an_mcp_server_is_called_and_every_token_is_as_it_was_sampled(
    way: str, python: str, tools: Path, request: pytest.FixtureRequest
) -> None:
    server = SERVER if way == "streams" else request.getfixturevalue("over_http")
    tokens = call(tools)
    env = Mcp(servers=[server], python=python, **CAPITALS)
    (rollout,) = played(env, tools, [*tokens, END], [64, END], size=1).rollouts
    first, second = rollout.turns
    assert second.prompt[: len(first.prompt) + len(tokens) + 1] == (*first.prompt, *tokens, END)
    assert [message.content for message in rollout.messages if message.role == "tool"] == ["42"]
    assert rollout.metrics == {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0}


def test_an_episode_has_the_rewards_of_its_turns(python: str, tiny_model: Path) -> None:
    env = OpenEnv(**{k: v for k, v in ENVIRONMENTS["openenv"].items() if k != "kind"}, python=python)
    first, second = played(env, tiny_model, [64, END], [64, 64, END]).rollouts
    for rollout in (first, second):
        assert [message.role for message in rollout.messages] == ["system", *["user", "assistant"] * 2]
        assert rollout.messages[1].content.startswith("Say ")
        assert rollout.metrics["reward"] == pytest.approx(sum(turn.reward or 0.0 for turn in rollout.turns))
        assert (rollout.metrics["turns"], rollout.metrics["done"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [("dies", "ConnectionClosed"), ("hangs", "took longer"), ("floods", "answer of more than 1 MiB")],
)
def test_a_server_that_fails_costs_its_rollouts(
    broken: str, message: str, python: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_package, "MOST_BYTES", 1 << 20)
    command = f"python broken_server.py {broken} {{port}}"
    seconds = 10.0 if broken == "hangs" else 60.0
    env = OpenEnv(command=command, observation="prompt", python=python, timeout_seconds=seconds, concurrency=8)
    env.tasks("train")
    for _ in range(2):  # again from the start: a new session, of a new server where it had ended
        failed = played(env, tiny_model, [64, END]).rollouts
        assert [rollout.status for rollout in failed] == ["error", "error"]
        assert message in failed[0].error
        assert len(failed[0].turns) == 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [("dies", "MCPError: Connection closed"), ("hangs", "took longer"), ("floods", "Too Large")],
)
def test_an_mcp_server_that_fails_costs_a_call_or_its_rollout(
    broken: str, message: str, python: str, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1 << 20)
    options = {**CAPITALS, "timeout_seconds": 15.0 if broken == "hangs" else 120.0}
    broken_server = {"args": ["broken_server.py", broken], "env": {"PYTHONPATH": str(ROOT / "recipes")}}
    env = Mcp(servers=[{"command": "python", **broken_server}], python=python, **options)
    (rollout,) = played(env, tools, [*call(tools), END], [64, END], size=1).rollouts
    assert message in (rollout.error or rollout.messages[2].content)
    assert rollout.metrics.get("tool_errors") == (1.0 if broken == "dies" else None)
    del env
    gc.collect()
    until(lambda: not running(f"broken_server.py\0{broken}"), "the end of the tools' server", 10)


def running(command: str) -> bool:
    """Whether a process has this in its command line."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_text(errors="replace"))
    return any(command in line for line in lines)


def test_what_cannot_be_played_is_said_before_anything_is(python: str) -> None:
    from tandem.envs.textarena import TextArena

    for options, message in (({"id": "TicTacToe-v0-raw"}, "number of players has to be 2"), ({"id": "x"}, "not found")):
        with pytest.raises(EnvError, match=message):
            TextArena(python=python, **options).tasks("train")
    with pytest.raises(ConfigError, match="give one of them"):
        OpenEnv(url="http://127.0.0.1:1", command="x")
