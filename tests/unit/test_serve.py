"""``tandem serve engine`` refuses what it cannot run, and a trainer finds what an engine lends by its file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tandem.cli.serve import serve
from tandem.config import loading as config
from tandem.engines.embedded.spec import Embedded
from tandem.engines.vllm.client.process import EngineProcess, environment
from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError, EngineError, TransportError, UnsupportedPair
from tandem.trainable.full import Full
from tandem.trainer.world import engine_requirements
from tandem.transport import sharing
from tandem.transport.bridge import VLLM_FILE, VllmBridge
from tandem.weight_sync.shared import Shared

pytestmark = pytest.mark.slow


def recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "steps": 1, "env": "arithmetic", "engine": "vllm", **changes}))
    return path


def interpreter(folder: Path) -> Path:
    """One that says it has vLLM."""
    path = folder / "python"
    path.write_text("#!/bin/sh\necho True\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["engine=embedded"], "runs engine: vllm"),
        (["engine.urls=['http://x:1']"], "remove it to start one"),
        (["sync=hotswap"], "whole weights"),
        (["engine.tensor_parallel_size=2"], "broadcast"),
        (["sync.bridge=."], "sync.bridge"),
        (["engine.python=/nowhere/python"], "/nowhere/python cannot be run"),
        (
            ["engine.api_key_variable=TANDEM_NO_SUCH_KEY", "engine.python=PYTHON", "model=MODEL"],
            "TANDEM_NO_SUCH_KEY is not set",
        ),
        (["runs=a:b"], "choose another"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, overrides: list[str], says: str
) -> None:
    lines: list[str] = []
    options = [o.replace("MODEL", str(tiny_model)).replace("PYTHON", str(interpreter(tmp_path))) for o in overrides]
    with pytest.raises((ConfigError, UnsupportedPair), match=says):
        serve(recipe(tmp_path, runs=str(tmp_path)), options, lines.append)
    assert not any("serving" in line for line in lines)


def test_the_folder_of_adapters_must_be_one_that_the_engine_can_be_told_of(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    path = recipe(tmp_path, runs="a:b", model=str(tiny_model))
    with pytest.raises(ConfigError, match="choose another"):
        serve(path, [f"engine.python={interpreter(tmp_path)}"], lambda line: None)


def test_an_engine_that_falls_says_why(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause stands far above the last lines."""
    script = "print('ValueError: no such head', *[f'leaked {i}' for i in range(50)], sep='\\n'); raise SystemExit(0)"

    @asynccontextmanager
    async def started(self: Vllm, **_: Any) -> AsyncIterator[Any]:
        process = EngineProcess.start([sys.executable, "-c", script], environment(os.environ), tmp_path / "log")
        try:
            while process.alive():
                await asyncio.sleep(0.02)
            yield SimpleNamespace(servers=[SimpleNamespace(url="http://x:1", process=process)], dead=lambda: [process])
        finally:
            await process.stop()

    monkeypatch.setattr(Vllm, "serve", started)
    path = recipe(tmp_path, runs=str(tmp_path), model=str(tiny_model), sync="broadcast")
    cause = r"the engine ended with exit code 0\n.*\n  ValueError: no such head\n"
    with pytest.raises(EngineError, match=cause) as error:
        serve(path, [f"engine.python={interpreter(tmp_path)}"], lambda line: None)
    assert str(error.value).endswith("  leaked 49")


def test_a_recipe_may_name_the_key_of_what_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    engine = config.load(recipe(tmp_path), ["engine.api_key_variable=SOME_KEY", "engine.port=1"]).config.engine
    assert isinstance(engine, Vllm)
    assert engine._server(0).key == "sesame"
    assert len(Vllm(port=1)._server(0).key) > 20, "a random one where none is named"


def test_the_file_is_for_engines_that_run_already() -> None:
    Shared(bridge=".").check(trainable=Full(), engine=Vllm(urls=("http://x:1",)))
    for engine in (Vllm(), Embedded()):
        with pytest.raises(UnsupportedPair, match=r"sync\.bridge"):
            Shared(bridge=".").check(trainable=Full(), engine=engine)


def test_weights_are_found_by_the_file_under_their_own_names(tmp_path: Path) -> None:
    fused = torch.arange(24.0).view(6, 4)
    exported = sharing.export_host({"qkv.weight": fused, "norm.weight": torch.ones(4)}, tmp_path / "weights")

    def place(name: str, first: int, shape: list[int]) -> list[dict[str, Any]]:
        stride = [4, 1][-len(shape) :]
        return [{"vllm_name": name, "device": "cpu", "size": shape, "stride": stride, "offset": first}]

    places = {
        "q": place("qkv.weight", 0, [4, 4]),
        "k": place("qkv.weight", 16, [2, 4]),
        "n": place("norm.weight", 0, [4]),
    }
    written = VllmBridge.of_places("m", exported.description, places, url="http://x:1").write(tmp_path)
    assert written == tmp_path / VLLM_FILE
    bridge = VllmBridge.read(tmp_path)
    assert bridge.param_names == ["norm.weight", "qkv.weight"]
    assert bridge.param_mappings["qkv.weight"].shape == [6, 4]
    assert bridge.tandem["url"] == "http://x:1"
    attached = bridge.attach()
    assert torch.equal(attached["k"], fused[4:])
    attached["k"].fill_(7)
    assert exported.tensors["qkv.weight"][4:].eq(7).all(), "it is the lender's memory"
    assert torch.equal(exported.tensors["qkv.weight"][:4], fused[:4])
    exported.close()
    with pytest.raises(TransportError, match="restarted"):
        bridge.attach()


def test_a_file_that_does_not_say_where_names_lie_is_refused(tmp_path: Path) -> None:
    exported = sharing.export_host({"w": torch.ones(2)}, tmp_path / "weights")
    path = VllmBridge.of_places("m", exported.description, {"w": [{"device": "cpu"}]}).write(tmp_path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "tandem": {"lent": fields["tandem"]["lent"]}}))
    with pytest.raises(TransportError, match="tandem serve engine"):
        VllmBridge.read(path).attach()
    exported.close()


def test_an_engine_wraps_the_layers_that_are_adapted_and_never_the_head(tmp_path: Path, tiny_model: Path) -> None:
    """With a wrapped head, scoring a prompt beside other requests ends vLLM's engine."""
    for options, names in (
        ({}, "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ({"target_modules": ["q_proj", "v_proj"]}, "q_proj v_proj"),
    ):
        path = recipe(tmp_path, model=str(tiny_model), trainable={"kind": "lora", **options}, sync="hotswap")
        parsed = config.load(path).config
        assert isinstance(parsed.engine, Vllm)
        command = parsed.engine.command(engine_requirements(parsed, tmp_path), 64, model="m", port=1)
        first = command.index("--lora-target-modules") + 1
        assert command[first : first + len(names.split())] == names.split()
        assert not {"lm_head", "embed_tokens"} & set(command)
    plain = config.load(recipe(tmp_path, model=str(tiny_model))).config
    assert engine_requirements(plain, tmp_path).targets == ()
