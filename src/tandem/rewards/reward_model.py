"""A neural reward: what a sequence-classification model says of the prompt and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tandem.errors import ConfigError
from tandem.rewards._classifier import Classifier, loaded
from tandem.rewards.base import GroupReward, Verdict
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class RewardModel(GroupReward):
    """The model's output for the conversation, written by its own chat template, in a process of its own.

    One without a template whose tokenizer separates texts (DeBERTa, BERT) reads the pair of question and answer.

    That is the logit as it is: no sigmoid, no normalisation. Every environment that uses one loads it once.
    """

    pure: ClassVar[bool] = True

    model: str
    """Hugging Face id or a local folder, with a head for sequence classification."""
    label: int | None = None
    """Which output is the reward, from 0; null: the only one."""
    device: str = "cpu"
    """Where it computes: cpu, cuda, cuda:1."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of its weights; auto: as they were saved."""
    batch: int = 8
    """Conversations in one forward pass, those of like length together."""
    chat_template: str = ""
    """Jinja chat template, as text or the path of a file; empty: its tokenizer's own."""
    timeout_seconds: float = field(default=120.0, metadata={"formerly": "timeout"})
    """Seconds that all siblings of a task together may take."""

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError("model must be a Hugging Face id or a folder, got an empty text")
        if self.label is not None and self.label < 0:
            raise ConfigError(f"label must be at least 0, got {self.label}")
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, got {self.batch}")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be above 0 (seconds), got {self.timeout_seconds}")

    def prepare(self) -> None:
        """Load the model; raises RewardError if it cannot be loaded or has no such output or chat template."""
        self._loaded()

    def scores(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        return self._loaded().scores([rollout.messages for rollout in rollouts], self.batch)

    def _loaded(self) -> Classifier:
        return loaded(self.model, self.label, self.device, self.dtype, self.chat_template)

    @property
    def full_marks(self) -> None:
        return None

    @property
    def alone(self) -> bool:
        return True

    @property
    def start_seconds(self) -> float:
        return 1800.0  # a large model may have to be fetched first

    @property
    def call_seconds(self) -> float:
        return self.timeout_seconds
