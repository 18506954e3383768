"""A neural reward model against what transformers alone computes, one conversation at a time and unpadded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tandem.errors import RewardError
from tandem.rewards.base import Failure
from tandem.rewards.grading.workers import Graders
from tandem.rewards.number import Number
from tandem.rewards.reward_model import RewardModel
from tandem.rollout.gold import gold_rollout
from tandem.types import Message, Rollout, Task

REPLIES = ("7", "It is seven, I think, or perhaps not.", "", "ä ½", "7", "x" * 90, "no", "yes " * 12, "7 7", "never")


def build(folder: Path, *, labels: int = 1, context: int = 1024) -> Path:
    """A random classifier with the tokenizer of the tiny model."""
    build_tiny_model(folder, context=context)
    config = LlamaConfig.from_pretrained(folder, num_labels=labels)
    torch.manual_seed(7)
    model = LlamaForSequenceClassification(config).float()
    torch.nn.init.normal_(model.score.weight)  # far apart, so that a wrong row or column cannot pass
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reward-model"))


def group(*replies: str) -> list[Rollout]:
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content="What is 3 + 4?"))
    task = Task(id="t", env="e", prompt=prompt, answer="7")
    return [replace(gold_rollout(task, reply), id=f"t@0/{i}") for i, reply in enumerate(replies)]


def graded(specs: Mapping[str, Any], rollouts: list[Rollout], **options: Any) -> list[Rollout]:
    async def go() -> list[Rollout]:
        async with Graders({name: (spec, 1.0) for name, spec in specs.items()}, **options) as graders:
            return await graders.grade(rollouts)

    return asyncio.run(go())


def by_hand(folder: Path, rollouts: list[Rollout], label: int = 0) -> list[float]:
    """Logits of the last token: no padding, no batch, the template written out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for rollout in rollouts:
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in rollout.messages)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
            scores.append(float(model.score(hidden)[label]))
    return scores


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_scores_are_the_models_logits(folder: Path, batch: int) -> None:
    rollouts = group(*REPLIES)
    got = RewardModel(model=str(folder), batch=batch).scores(rollouts)
    expected = by_hand(folder, rollouts)
    assert got == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.1  # they differ by more than the tolerance
    assert len({round(value, 4) for value in expected}) == len(set(REPLIES))


def test_padding_changes_nothing_for_a_model_that_sees_it(tmp_path: Path) -> None:
    """An encoder looks both ways, counts positions from the left and reads its first token."""
    folder = build_tiny_model(tmp_path / "encoder")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(7)
    config = BertConfig(vocab_size=259, max_position_embeddings=256, num_labels=1, initializer_range=0.5, **sizes)
    model = BertForSequenceClassification(config).float().eval()
    model.save_pretrained(folder)
    rollouts, tokenizer = group(*REPLIES), AutoTokenizer.from_pretrained(folder)
    expected = []
    for rollout in rollouts:
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in rollout.messages)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            expected.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.item())
    assert RewardModel(model=str(folder), batch=4).scores(rollouts) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.1


def test_one_without_a_template_reads_question_and_answer_as_a_pair(tmp_path: Path) -> None:
    """As DeBERTa's reward models were trained; with BERT's tokenizer types say which of the two a token is of."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789?+.,"]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, *(f"##{word}" for word in words[5:])]))
    BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=512).save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(7)
    config = DebertaV2Config(vocab_size=90, type_vocab_size=2, num_labels=1, initializer_range=0.5, **sizes)
    DebertaV2ForSequenceClassification(config).float().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rollouts = group("seven", "no", "i think so, yes", "7.")
    expected = []
    for rollout in rollouts:
        pair = tokenizer("Be brief.\nWhat is 3 + 4?", rollout.messages[-1].content, return_tensors="pt")
        assert pair["token_type_ids"].tolist() != torch.zeros_like(pair["input_ids"]).tolist()
        with torch.no_grad():
            expected.append(model(**pair).logits.item())
    assert RewardModel(model=str(tmp_path), batch=3).scores(rollouts) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.1


@pytest.mark.slow
def test_the_model_grades_in_a_process_of_its_own(folder: Path) -> None:
    rollouts = group(*REPLIES)
    rollouts[3] = replace(rollouts[3], status="error", error="the engine gave up")
    got = graded({"rm": RewardModel(model=str(folder)), "number": Number()}, rollouts)
    expected = by_hand(folder, rollouts)
    assert got[3] == rollouts[3]
    for at, rollout in enumerate(got):
        if at != 3:
            assert rollout.rewards["rm"] == pytest.approx(expected[at], abs=1e-4)
            assert rollout.reward == pytest.approx(rollout.rewards["rm"] + rollout.rewards["number"])


def test_a_conversation_that_is_too_long_costs_its_rollout(tmp_path: Path) -> None:
    folder = build(tmp_path / "short", context=128)
    rollouts = group("7", "x" * 200, "8")
    first, second, third = RewardModel(model=str(folder)).scores(rollouts)
    tokens = len("".join(f"??{m.role}{m.content}" for m in rollouts[1].messages)) + 2 * 3  # bytes, marks, line ends
    assert second == Failure("bad_value", f"cannot read {tokens} tokens, prompt included: {folder} reads 128")
    assert [first, third] == pytest.approx(by_hand(folder, [rollouts[0], rollouts[2]]), abs=1e-4)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """transformers would give it a random one."""
    folder = build_tiny_model(tmp_path / "policy")
    with pytest.raises(RewardError, match=r"lacks score.weight: it has no head for sequence classification"):
        RewardModel(model=str(folder)).prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model": "/nowhere/at/all"}, "cannot be loaded on cpu"), ({"device": "quantum"}, "cannot be loaded on quantum")],
)
def test_what_cannot_be_loaded_is_told(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardModel(**{"model": str(folder), **options}).prepare()
