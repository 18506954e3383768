"""Mappings of a recipe that choose no part: evaluation, checkpoints, grading, replay, alarms, a broker, and ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config import registry as resolve
from tandem.errors import Bounded, bounded, check_bounds, require
from tandem.machine import cores
from tandem.observability.alarms import Name
from tandem.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Bounded):
    """Measuring on held-out tasks."""

    every: int = bounded(0)
    """Steps between evaluations; 0 evaluates only before and after."""
    tasks: int = bounded(40)
    """Held-out tasks, the first of the test split; 0 never evaluates."""
    samples: int = bounded(4, least=1)
    """Answers per task: mean@k and pass@k are over these."""
    temperature: float | None = bounded(None)
    """Sampling temperature; 0 is greedy, null is that of sampling."""
    top_p: float | None = bounded(None, above=0, most=1)
    """Nucleus of the evaluation's answers; 1 keeps every token, null is that of sampling."""
    before: bool = True
    """Evaluate the model as loaded."""
    after: bool = True
    """Evaluate after the last step."""

    def sampling(self, training: Sampling) -> Sampling:
        """How the answers are sampled: as those that are trained on, but for what is said here."""
        temperature = training.temperature if self.temperature is None else self.temperature
        return replace(training, temperature=temperature, top_p=training.top_p if self.top_p is None else self.top_p)

    def inert(self) -> Mapping[str, str]:
        """Without tasks or occasions nothing else is read; greedy answers are all alike."""
        if self.tasks == 0:
            others = (f.name for f in resolve.options(Evaluate) if f.name != "tasks")
            return dict.fromkeys(others, "tasks is 0, so nothing is evaluated")
        if not (self.before or self.after or self.every):
            never = "before and after are false and every is 0, so nothing is evaluated"
            return dict.fromkeys(("tasks", "samples", "temperature", "top_p"), never)
        if self.temperature == 0:
            greedy = "temperature is 0, so an answer is always the likeliest one"
            return {"top_p": greedy, **({"samples": greedy} if self.samples > 1 else {})}
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Bounded):
    """Checkpoints: when, where and how many. One is always written at the end, unless save is none."""

    save: Literal["all", "weights", "none"] = "all"
    """What is saved: all that a resume needs, the weights alone (to export and evaluate, at a third of the size or
    less), or nothing; a run can go on from all of it only."""
    every: int = bounded(50, least=1)
    """Steps between checkpoints."""
    keep: int = bounded(2, least=1)
    """Newest checkpoints that are kept."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Copy what is saved to host memory and write it while training goes on, or have training wait until it is
    written; auto copies where the weights are on a GPU."""

    def inert(self) -> Mapping[str, str]:
        """Where nothing is saved, there is no when and how many."""
        others = ("every", "keep", "asynchronous")
        return dict.fromkeys(others, "save is none, so nothing is saved") if self.save == "none" else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingOptions(Bounded):
    """Worker processes that compute rewards and can be killed."""

    workers: int | None = bounded(None, least=1)
    """Grader processes of each environment; null: one for each core, but no more than a step has answers."""
    timeout_seconds: float = bounded(10.0, above=0)
    """Seconds one rollout's rewards may take; then its grader is killed and the rollout counts as failed."""

    def processes(self, answers: int) -> int:
        """How many each environment has that plays so many answers at a time: each grades one of them."""
        return self.workers or min(cores(), answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Bounded):
    """Groups that had signal, trained again in the place of those that have none."""

    size: int = bounded(0)
    """Groups that are kept, the newest that were trained and had variance; 0 keeps none."""
    max_age: int = bounded(8, least=1)
    """Most steps by which the weights that sampled a replayed token may be older than those it trains, in place of
    max_lag."""

    def inert(self) -> Mapping[str, str]:
        """Without a store there is nothing that could be too old."""
        return {} if self.size else {"max_age": "size is 0, so nothing is replayed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reroll(Bounded):
    """Unsolved tasks, drawn again when the policy has learned more."""

    start_fraction: float = bounded(1.0, most=1)
    """Part of all steps after which they come; 1 is never."""
    max_groups: int = bounded(1, least=1)
    """Most of them that are drawn for one batch."""

    def inert(self) -> Mapping[str, str]:
        """Never is never, however many."""
        return {} if self.start_fraction < 1 else {"max_groups": "start_fraction is 1, so nothing is drawn again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """Reaction to metrics that show training going wrong while nothing is broken."""

    action: Literal["warn", "stop"] = "warn"
    """Tell it, or also end the run with everything saved."""
    ignore: tuple[Name, ...] = ()
    """Alarms that are not looked for."""


@dataclass(frozen=True, kw_only=True)
class BrokerAt:
    """A broker between environments and a trainer."""

    url: str
    """Its address, such as http://127.0.0.1:8000 (tandem serve broker, or Atropos' run-api)."""
    key_variable: str = ""
    """Environment variable with the API key, where the broker asks for one."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(url=(self.url.startswith(("http://", "https://")), "an address that begins with http:// or https://"))


@dataclass(frozen=True, kw_only=True)
class BrokerOptions(BrokerAt):
    """Environments elsewhere: what they sample and score is trained on, through a broker."""

    lease_seconds: float = bounded(600.0, above=0)
    """How long the broker keeps a batch for a trainer that it does not hear of; then it is served again."""
    missing_logprobs: Literal["refuse", "policy"] = "refuse"
    """Groups without sampling logprobs: end with an error, or train as if the policy of now had sampled them."""
    env_advantages: bool = False
    """Train on the advantages that environments give for each token; where one gives none, the recipe's advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed(Bounded):
    """Division of a step among the trainer's ranks."""

    shard: Literal["states", "weights"] = "states"
    """What each rank keeps a share of: gradients, masters and moments (as ZeRO-2), or the weights too (as ZeRO-3)."""
    gradients: Literal["auto", "scattered", "local"] = "auto"
    """When ranks sum gradients: those of each micro-batch, while backward goes on, or once a pass what each has added
    up by itself, for 4 bytes a weight more on every rank. auto: local where a step has several micro-batches for each
    rank and the memory plan has room."""
    replicas: int = bounded(1, least=1)
    """Of the whole model where weights are cut (HSDP): each is cut among ranks / replicas neighbours; 1: among all."""
    context_parallel: int = bounded(1, least=1)
    """Ranks that share one sequence; 1 divides none."""
    timeout_seconds: float = bounded(120.0, above=0)
    """How long a rank waits for the others in one collective operation before the run ends with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart(Bounded):
    """Supervised training (SFT) on given replies, before the policy's own answers are trained or in their place."""

    steps: int | None = bounded(None, least=1)
    """The first so many steps of the run; null: those of epochs, or all of them, as tandem sft sets it."""
    epochs: float | None = bounded(None, above=0)
    """Passes over the replies, in place of steps."""
    data: str | None = None
    """A file or a data set on the hub with rows of messages, or of prompt and completion; null: the environment's gold
    replies."""
    test_share: float = bounded(0.1, below=1)
    """Share of these rows that is held out; evaluations measure its loss."""
    lr: float | None = bounded(None, above=0)
    """Peak learning rate of these steps; null: the optimizer's. Its schedule begins anew after them."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(epochs=(self.epochs is None or self.steps is None, "left out where steps is given"))

    def inert(self) -> Mapping[str, str]:
        """Gold replies are held out as the environment's tasks are."""
        return {} if self.data else {"test_share": "data is null: the environment's test tasks are held out"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher(Bounded):
    """A model that the policy is to match on its own answers: on-policy distillation."""

    model: str = ""
    """Hugging Face id or a local folder; with url what the server calls it, where it serves several."""
    url: str = ""
    """Address of a vLLM server that scores answers, such as http://127.0.0.1:8000; empty: the model is loaded here."""
    key_variable: str = ""
    """Environment variable with the server's API key; empty: none is sent."""

    def __post_init__(self) -> None:
        require(
            model=(bool(self.model.strip() or self.url), "a Hugging Face id or a folder, or left out with url"),
            url=(not self.url or self.url.startswith(("http://", "https://")), "an address that begins with http://"),
        )


def _compiles(regex: str) -> bool:
    try:
        re.compile(regex)
    except re.error:
        return False
    return True


def sampling_checks(sampling: Sampling) -> Mapping[str, tuple[bool, str]]:
    """Checks of the sampling options of training, for ``require``."""
    two = "from -2 to 2"
    checks = {
        # vLLM takes what is lower for 0.01, and says so in its log alone.
        "temperature": (0.01 <= sampling.temperature < math.inf, "at least 0.01: greedy answers are all alike"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "at least 0"),
        "min_p": (0 <= sampling.min_p < 1, "at least 0 and below 1"),
        "repetition_penalty": (0 < sampling.repetition_penalty < math.inf, "above 0; 1 is off"),
        "presence_penalty": (-2 <= sampling.presence_penalty <= 2, two),
        "frequency_penalty": (-2 <= sampling.frequency_penalty <= 2, two),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, "from 0 to max_tokens"),
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "stop": (all(sampling.stop), "texts that are not empty"),
        "regex": (_compiles(sampling.regex), "a regular expression"),
        "stop_token_ids": (all(token >= 0 for token in sampling.stop_token_ids), "token ids, which are at least 0"),
    }
    return {f"sampling.{name}": check for name, check in checks.items()}
