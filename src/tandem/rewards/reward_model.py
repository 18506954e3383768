"""Neural reward: a sequence-classification model, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from tandem.errors import RewardError, bounded
from tandem.rewards.base import Failure, GroupReward, Verdict
from tandem.types import TEXT, Message, Rollout


@dataclass(frozen=True, kw_only=True)
class RewardModel(GroupReward):
    """The model's output for the conversation, written by its own chat template, in a process of its own.

    One without a template whose tokenizer separates texts (DeBERTa, BERT) reads the pair of question and answer.

    That is the logit as it is: no sigmoid, no normalisation. Every environment that uses one loads it once.
    """

    full_marks: ClassVar[None] = None
    alone: ClassVar[bool] = True
    start_seconds: ClassVar[float] = 1800.0  # a large model may have to be fetched first

    model: str
    """Hugging Face id or a local folder, with a head for sequence classification."""
    label: int | None = bounded(None)
    """Which output is the reward, from 0; null: the only one."""
    device: str = "cpu"
    """Where it computes: cpu, cuda, cuda:1."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of its weights; auto: as they were saved."""
    batch: int = bounded(8, least=1)
    """Conversations in one forward pass, those of like length together."""
    timeout_seconds: float = bounded(120.0, above=0)
    """Seconds that all siblings of a task together may take."""

    def prepare(self) -> None:
        """Load the model; raises RewardError if it cannot be loaded or has no such output or chat template."""
        self._loaded()

    def scores(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        return self._loaded().scores([rollout.messages for rollout in rollouts], self.batch)

    def _loaded(self) -> Classifier:
        return loaded(self.model, self.label, self.device, self.dtype)

    @property
    def call_seconds(self) -> float:
        return self.timeout_seconds


@cache
def loaded(name: str, label: int | None, device: str, dtype: str) -> Classifier:
    """The model, once in a process; arguments are the options of ``RewardModel``.

    Raises:
        RewardError: it cannot be loaded, or has no such output or chat template.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        where = torch.device(device)
        options = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype), "trust_remote_code": False}
        model, info = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True, **options)
        model.to(where).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError) as error:  # no such model or device; the message says which
        raise RewardError(f"reward model {name} cannot be loaded on {device}: {error}") from error
    if missing := sorted(info["missing_keys"]):  # its head would be random
        lacks = f"lacks {', '.join(missing[:3])}: it has no head for sequence classification"
        raise RewardError(f"reward model {name} {lacks}; name a model that was trained as a reward model")
    if not tokenizer.chat_template and tokenizer.sep_token_id is None:
        raise RewardError(f"reward model {name} has no chat template; save one with its tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # its head looks for the last token before
    model.config.pad_token_id = tokenizer.pad_token_id
    outputs: int = model.config.num_labels
    if (label or 0) >= outputs or (label is None and outputs > 1):
        raise RewardError(f"reward model {name} has {outputs} outputs; give the option label, from 0, not {label}")
    return Classifier(name, model, tokenizer, label or 0, where)


class Classifier:
    """A loaded sequence-classification model with its tokenizer."""

    def __init__(self, name: str, model: Any, tokenizer: Any, label: int, device: Any) -> None:
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._label = label
        self._device = device
        limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
        self._most: int = min(limit for limit in limits if limit is not None)

    def scores(self, conversations: Sequence[Sequence[Message]], batch: int) -> list[Verdict]:
        """The chosen output for each conversation; one that is longer than the model reads is a failure."""
        inputs = [self._inputs(messages) for messages in conversations]
        lengths = [len(read["input_ids"]) for read in inputs]
        scores: list[Verdict] = [
            Failure("bad_value", f"cannot read {length} tokens, prompt included: {self._name} reads {self._most}")
            for length in lengths
        ]
        rows = [row for row in sorted(range(len(inputs)), key=lengths.__getitem__) if lengths[row] <= self._most]
        for start in range(0, len(rows), batch):
            chosen = rows[start : start + batch]
            for row, score in zip(chosen, self._forward([inputs[row] for row in chosen]), strict=True):
                scores[row] = score
        return scores

    def _inputs(self, messages: Sequence[Message]) -> dict[str, list[int]]:
        """What the model reads, by name: token ids, and of a pair which of the two each is of."""
        if any(message.role == TEXT for message in messages):
            text = "".join(message.content for message in messages)
        elif self._tokenizer.chat_template:
            plain = [message.as_dict() for message in messages]
            text = self._tokenizer.apply_chat_template(plain, tokenize=False)
        else:  # one that was trained on pairs of question and answer
            question = "\n".join(message.content for message in messages[:-1])
            pair = self._tokenizer(question, messages[-1].content, return_attention_mask=False, verbose=False)
            return {name: list(ids) for name, ids in pair.items()}
        return {"input_ids": list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])}

    def _forward(self, inputs: Sequence[dict[str, list[int]]]) -> list[float]:
        """Scores of one batch, padded on the right."""
        import torch

        padded = self._tokenizer.pad(list(inputs), padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            logits = self._model(**{name: ids.to(self._device) for name, ids in padded.items()}).logits
        scores: list[float] = logits[:, self._label].float().tolist()
        return scores
