"""Model folders that cannot be used: the message says why, and nobody is asked at a terminal."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError
from tandem.model.policy import load_config, load_model, load_tokenizer

_TOKENIZER = {"tokenizer_class": "A", "auto_map": {"AutoTokenizer": ["own.A", None]}}


def _load_weights(folder: str) -> Any:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("load", "file", "changes"),
    [
        (load_config, "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.A"}}),
        (_load_weights, "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.A"}}),
        (load_tokenizer, "tokenizer_config.json", _TOKENIZER),
    ],
    ids=["config", "weights", "tokenizer"],
)
def test_code_in_a_model_folder_is_refused_without_a_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any], file: str, changes: dict[str, Any]
) -> None:
    def refuse(prompt: str = "") -> str:
        raise AssertionError(prompt)

    monkeypatch.setattr(builtins, "input", refuse)
    (folder / "own.py").write_text("raise AssertionError('run')")
    written = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(written | changes))
    with pytest.raises(
        ConfigError, match=r"needs code from its repository \(trust_remote_code\), and Tandem runs none"
    ):
        load(str(folder))


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("model.safetensors", b"\xff" * 100, "Error while deserializing header"),
        ("pytorch_model.bin", b"\xff" * 100, "Weights only load failed"),
        ("pytorch_model.bin", b"", "it is empty"),
    ],
    ids=["safetensors", "bin", "empty"],
)
def test_a_damaged_weights_file_is_told(folder: Path, file: str, content: bytes, why: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a weights file of model .* is damaged \({why}.*\); fetch the model again"):
        _load_weights(str(folder))
