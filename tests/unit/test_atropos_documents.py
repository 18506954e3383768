"""Every command line of Atropos' documents goes through as it is written: translated, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.atropos_document import BROKERS, ENGINES, ENVIRONMENTS, REFUSED, TRAINERS, command

from tandem.cli import app as cli
from tandem.config.loading import RunConfig, from_options
from tandem.engines.vllm.spec import Vllm
from tandem.trainer.pairs import check_pairs
from tandem.transport import bridge
from tandem_broker.recipe import Work

SYNC = {
    "none": "Restart",
    "shared_vllm": "Shared",
    "lora_only": "Hotswap",
    "lora_restart": "Restart",
    "lora_nccl": "Broadcast",
}
"""How weights travel, by --weight-bridge-mode."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing of this runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bridge, "LAST_RESORT", tmp_path / "nowhere")
    monkeypatch.setattr("tandem_compat.atropos.services.get_json", lambda url, key="": (0, None))
    for name in ("LOGDIR", "NUM_INFERENCE_NODES", "MASTER_ADDR", "MASTER_PORT", "TANDEM_OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def exit_code(line: str, *more: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a line of the document."""
    invocation = command(line)
    for name, value in invocation.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        cli.main([*invocation.words, *more])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def recipe(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunConfig:
    """What ``--show`` makes of a line, read back, its parts found to go together."""
    capsys.readouterr()
    code = exit_code(line, "--show", monkeypatch=monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    config = from_options(yaml.safe_load(printed.out), (), Path("the document")).config
    check_pairs(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = TRAINERS[name]
    config = recipe(line, monkeypatch, capsys)
    assert config.broker is not None
    assert isinstance(config.engine, Vllm)
    assert config.group_size in (4, 8)
    mode = next((mode for mode in SYNC if f"mode {mode}" in line), "shared_vllm" if "trainer.run " in line else "none")
    assert type(config.sync).__name__ == ("Broadcast" if "--use-shared-memory" in line else SYNC[mode])
    assert bool(config.engine.urls) == ("--vllm-config-path" in line), "no engine serves here, but one was named"
    assert config.engine.require_api_key == bool(config.engine.urls), "environments have no key of a started engine"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = ENGINES[name]
    config = recipe(line, monkeypatch, capsys)
    assert isinstance(config.engine, Vllm)
    assert (config.engine.port, config.engine.host, config.dtype) == (9001, "127.0.0.1", "bfloat16")
    shared, lora = "SHARED_WEIGHTS=1" in line, "--enable-lora" in line
    assert type(config.sync).__name__ == ("Hotswap" if lora else "Shared" if shared else "Broadcast")
    assert type(config.trainable).__name__ == ("Lora" if lora else "Full")
    assert config.engine.enforce_eager == ("--enforce-eager" in line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    played: list[Work] = []
    monkeypatch.setattr("tandem_broker.commands.work.play", lambda config: played.append(config) or "ended")
    monkeypatch.setattr("tandem_broker.commands.work.served_model", lambda url, key: "the engine's")
    assert exit_code(ENVIRONMENTS[name], monkeypatch=monkeypatch) == 0, capsys.readouterr().err
    (config,) = played
    assert config.engine.urls == ("http://localhost:9001/v1",)
    assert config.group_size == 4
    assert config.model == ("the engine's" if name == "2025-12" else config.engine.model)


@pytest.mark.parametrize("line", BROKERS)
def test_brokers(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr("tandem_broker.commands.serve.serve_broker", lambda *words: begun.append(words))
    assert exit_code(line, monkeypatch=monkeypatch) == 0
    assert begun[0][1] == (8002 if "8002" in line else 8000)


@pytest.mark.parametrize("name", REFUSED)
def test_another_objective_is_refused_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, reason = REFUSED[name]
    assert exit_code(line, monkeypatch=monkeypatch) == 2
    assert reason in capsys.readouterr().err
