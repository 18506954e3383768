"""Refusals of a recipe: ``--show``, ``tandem check`` and a run say the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import build_tiny_model

from tandem.cli.check import check
from tandem.cli.train import shown
from tandem.config.loading import load
from tandem.errors import TandemError
from tandem.trainer import assemble

REFUSED = (
    ("ranks=2", "engine={kind: vllm, urls: ['http://h:1']}"),
    ("ranks=3", "engine={kind: vllm, tensor_parallel_size: 2}", "distributed.shard=weights"),
    ("ranks=2", "sync=broadcast", "engine={kind: vllm, urls: ['http://h:1']}", "optimizer=adafactor"),
    ("ranks=3", "distributed.context_parallel=2"),
    ("ranks=2", "distributed.shard=weights", "reference={kind: average, every: 1}"),
    ("sync=hotswap", "trainable={kind: lora, rank: 999}", "engine={kind: vllm, urls: ['http://h:1']}"),
    ("distributed.shard=weights",),
    ("sync=broadcast",),
)


@pytest.mark.parametrize("options", REFUSED)
def test_show_check_and_a_run_refuse_alike(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {build_tiny_model(tmp_path / 'tiny')}\nsteps: 3\nenv: arithmetic\nruns: {tmp_path}/runs\n")
    loaded = load(path, options)
    with pytest.raises(TandemError) as by_show:
        shown(loaded, ())
    with pytest.raises(TandemError) as by_run:
        asyncio.run(assemble.train(loaded.config, resume=None))
    assert str(by_run.value) == str(by_show.value)
    try:
        assert check(path, options, 1) == by_show.value.exit_code
        output = capsys.readouterr().out
    except TandemError as error:
        output = str(error)
    assert " ".join(str(by_show.value).split())[:60] in " ".join(output.split())
