"""Examples of Axolotl's and ms-swift's documents, unchanged but for model, data and sizes: two steps are trained."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import lines, metrics
from tiers import long_but
from transformers import BertTokenizerFast, DebertaV2Config, DebertaV2ForSequenceClassification
from unit.test_documents import BLOCKS, SHORT, TRAINED, here, laid, swift_files

from tandem.cli.app import app as cli

pytestmark = pytest.mark.slow
__all__ = ["here"]


def tandem(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    assert stopped.value.code in (None, 0)


def reward_model(folder: Path) -> None:
    """Like OpenAssistant's: DeBERTa, without a chat template."""
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789+=?"]
    (folder / "vocab.txt").write_text("\n".join([*words, *(f"##{word}" for word in words[5:])]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = DebertaV2Config(vocab_size=90, num_labels=1, initializer_range=0.5, **sizes)
    DebertaV2ForSequenceClassification(config).float().save_pretrained(folder)


@pytest.mark.parametrize("what", long_but(["rollout function", "reward model", "gdpo"], "rollout function"))
def test_axolotls_examples_train(what: str, here: Path) -> None:
    """Those of a server play without one: the policy itself samples."""
    build_tiny_model(here / "Qwen/Qwen2.5-1.5B-Instruct")
    reward_model(here / "OpenAssistant/reward-model-deberta-v3-large-v2")
    file, block = BLOCKS[what]
    small = {"trl": {"use_vllm": False, "max_completion_length": 8}, "max_steps": 2, "gradient_accumulation_steps": 2}
    own = laid(laid(yaml.safe_load(SHORT if what == "reward model" else file), yaml.safe_load(block)), small)
    (here / "config.yaml").write_text(yaml.safe_dump(own | {"wandb_name": "run", "output_dir": "out", "bf16": False}))
    tandem("train", "config.yaml", "sampling.min_tokens=2")
    run = here / "out/run"
    assert list(metrics(run)) == [1, 2]
    rows = [row for step in (1, 2) for row in lines(run / f"rollouts/{step:06d}.jsonl")]
    assert len({row["reward"] for row in rows}) > 1
    if what == "rollout function":
        assert all(len(row["prompts"]) > 1 for row in rows)  # every generate is a turn of its own
        assert all(row["text"].count("Next step:") == 0 for row in rows)


@pytest.mark.parametrize("what", long_but(["transformers", "a reward function"], "a reward function"))
def test_ms_swifts_examples_train(what: str, here: Path) -> None:
    build_tiny_model(here / "Qwen/Qwen2.5-7B")
    swift_files(here)
    line, _ = TRAINED[what]
    small = "--max_steps 2 --max_completion_length 8 --torch_dtype float32 --run_name run --learning_rate 1e-3"
    tandem("swift", "rlhf", "--rlhf_type", "grpo", "--model", "Qwen/Qwen2.5-7B", *shlex.split(f"{line} {small}"))
    run = here / "output/run"
    assert list(metrics(run)) == [1, 2]
    assert len(lines(run / "completions.jsonl")) == 2


SCHEDULER = """
from swift.plugin import orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

class Again(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "Are you sure?"})
        return {"infer_request": infer_request}

multi_turns["again"] = Again
orms["asked"] = lambda completions, rollout_infos, **_: [
    info["num_turns"] + len(text) / 100 for text, info in zip(completions, rollout_infos)
]
"""


@pytest.mark.long
def test_a_scheduler_of_a_plug_in_plays_several_turns(here: Path) -> None:
    build_tiny_model(here / "tiny")
    swift_files(here)
    (here / "turns.py").write_text(SCHEDULER)
    line = (
        "--model tiny --dataset rows.jsonl --external_plugins turns.py --multi_turn_scheduler again --max_turns 2 "
        "--reward_funcs asked --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 4 "
        "--max_steps 2 --torch_dtype float32 --output_dir output --run_name run sampling.min_tokens=4"
    )
    tandem("swift", "rlhf", "--rlhf_type", "grpo", *shlex.split(line))
    rows = [row for step in (1, 2) for row in lines(here / f"output/run/rollouts/{step:06d}.jsonl")]
    for row in rows:  # an answer that is cut ends the conversation
        assert row["rewards"]["asked"] // 1 == len(row["prompts"])
