"""What a run needs in memory, line by line, before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tandem.config import RunConfig
from tandem.errors import DoesNotFit
from tandem.machine import Machine, accelerator, host, readable

When = Literal["always", "sampling", "training"]

LIBRARIES = 700_000_000
"""Bytes of Python with torch and transformers imported, measured on Linux."""
GRADER = 150_000_000
"""Bytes of one grader process."""
DRIVER = 600_000_000
"""Bytes that an accelerator's driver and kernels take."""
TYPICAL_PROMPT = 256
"""Tokens of a prompt where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that takes memory."""

    name: str
    """What it is."""
    bytes: int
    """How much it takes at its largest."""
    why: str
    """How the number comes about."""
    when: When = "always"
    """sampling and training take turns unless max_lag lets them overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """An estimate, and what it is held against."""

    lines: tuple[Line, ...]
    """Everything counted."""
    overlap: bool
    """True if sampling goes on while training does (max_lag above 0)."""
    machine: Machine
    """Where it has to fit."""
    parameters: int
    """Weights of the model, adapters included."""
    trainable: int
    """Those that are trained."""

    @property
    def total(self) -> int:
        """Bytes at the peak: what is always there and the larger of sampling and training, or both."""
        by: dict[str, int] = {"always": 0, "sampling": 0, "training": 0}
        for line in self.lines:
            by[line.when] += line.bytes
        turns = by["sampling"] + by["training"] if self.overlap else max(by["sampling"], by["training"])
        return by["always"] + turns

    @property
    def fits(self) -> bool:
        """True if the peak is within what is free."""
        return self.total <= self.machine.free

    def table(self) -> str:
        """The plan as text."""
        rows: list[tuple[str, str, str, str]] = [
            (line.name, readable(line.bytes), line.when, line.why) for line in self.lines
        ]
        both = "both at once" if self.overlap else "sampling and training take turns"
        rows.append(("at the peak", readable(self.total), "", both))
        rows.append(
            ("free", readable(self.machine.free), "", f"of {readable(self.machine.total)} on {self.machine.name}")
        )
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"  {name:<{widths[0]}}  {amount:>{widths[1]}}  {when:<{widths[2]}}  {why}".rstrip()
            for name, amount, when, why in rows
        )

    def require(self) -> None:
        """Refuse what cannot fit.

        Raises:
            DoesNotFit: with the table and what to change.
        """
        if self.fits:
            return
        advice = "; ".join(self._remedies()) or "use a smaller model"
        raise DoesNotFit(
            f"this run needs about {readable(self.total)}, and {self.machine.name} has "
            f"{readable(self.machine.free)} free:\n{self.table()}\nto make it fit: {advice}"
        )

    def _remedies(self) -> list[str]:
        """What would help most, largest line first."""
        advicefor = {
            "optimizer": "train an adapter (trains: lora)"
            if self.trainable == self.parameters
            else "lower trains.rank",
            "KV cache": "lower sampling.max_tokens, context or the engine's max_rows",
            "activations": "lower micro_batch_tokens",
            "weights": "choose a smaller model, or dtype: bfloat16",
            "logits": "lower the engine's max_rows",
        }
        largest = sorted(self.lines, key=lambda line: -line.bytes)
        return [advicefor[line.name] for line in largest if line.name in advicefor and line.bytes > self.total // 10]


def plan(
    config: RunConfig, model_config: Any, machine: Machine | None = None, *, prompt_tokens: int = TYPICAL_PROMPT
) -> MemoryPlan:
    """Estimate a run's memory.

    Args:
        config: the run.
        model_config: the model's transformers configuration; no weight is loaded.
        machine: where it has to fit; by default the accelerator, or else the host.
        prompt_tokens: tokens of the longest prompt.
    """
    machine = machine or accelerator() or host()
    text = model_config.get_text_config()
    width = _width(config)
    parameters, trainable, largest = count(config, model_config)
    turns = getattr(config.env, "max_turns", 1)  # what environments of several turns call their limit
    length = min(context(config, model_config), prompt_tokens + turns * config.sampling.max_tokens)
    rows = _rows(config)
    tokens = max(config.micro_batch_tokens, length)
    per_token = activation_bytes(text, width, machine.is_host)
    optimizer = config.optimizer.state_bytes(trainable, width)
    lines = [
        _base(config, machine),
        Line(name="weights", bytes=parameters * width, why=f"{parameters:,} parameters × {width} bytes"),
        Line(
            name="optimizer",
            bytes=optimizer,
            why=f"{trainable:,} trained parameters × {optimizer / trainable:.0f} bytes",
        ),
        Line(
            name="gradients",
            bytes=2 * largest * width,
            why=f"twice the largest tensor, {largest:,} × {width} bytes; each goes to the optimizer at once",
            when="training",
        ),
        Line(
            name="activations",
            bytes=tokens * per_token,
            why=f"one micro-batch: {tokens:,} tokens × {per_token:,} bytes",
            when="training",
        ),
        _kv_cache(text, rows, length, width),
        Line(
            name="logits",
            bytes=rows * text.vocab_size * 4 * 3,
            why=f"{rows} rows × {text.vocab_size:,} tokens × 4 bytes, and two copies to choose from",
            when="sampling",
        ),
    ]
    return MemoryPlan(
        lines=tuple(lines), overlap=config.max_lag > 0, machine=machine, parameters=parameters, trainable=trainable
    )


def context(config: RunConfig, model_config: Any) -> int:
    """Most tokens of a prompt and its answer together."""
    own: int = model_config.get_text_config().max_position_embeddings
    return own if config.context is None else min(config.context, own)


def checkpoint_bytes(config: RunConfig, model_config: Any) -> int:
    """Bytes of one checkpoint on disk, at most: what is trained and the optimizer's state."""
    _, trainable, _ = count(config, model_config)
    width = _width(config)
    return trainable * width + config.optimizer.state_bytes(trainable, width)


def count(config: RunConfig, model_config: Any) -> tuple[int, int, int]:
    """Parameters of the model, those trained, and those of the largest trained tensor; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
        model = config.trains.prepare(model)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return sum(parameter.numel() for parameter in model.parameters()), sum(trained), max(trained)


def activation_bytes(text: Any, width: int, on_cpu: bool) -> int:
    """Bytes kept per token for the backward pass, over all layers of a Llama-like model.

    Per layer, with h the hidden size, q and k the sizes of queries and keys, f that of the feed-forward layer:
    the two norms keep their input in float32, its normalised form and their output (2 × (4h + 2wh) for weights
    of w bytes); attention keeps queries, keys, values and output (in float32 on a CPU, where it is computed so)
    and the projection's input (wq); the feed-forward layer keeps gate, up, activation and product (4wf). A tenth
    is added for the prompt's keys and values, which are copied for each sibling.
    """
    hidden, heads = text.hidden_size, text.num_attention_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
    feed_forward = getattr(text, "intermediate_size", None) or 4 * hidden
    attention = (4 if on_cpu else width) * (2 * queries + 2 * keys) + width * queries
    layer = 2 * (4 + 2 * width) * hidden + attention + 4 * width * feed_forward
    return int(1.1 * layer * text.num_hidden_layers)


def _width(config: RunConfig) -> int:
    """Bytes of one weight."""
    return 2 if config.dtype == "bfloat16" else 4


def _rows(config: RunConfig) -> int:
    """Sequences the engine samples at once: its own limit, which sizes its cache, or all that may be asked for."""
    asked = config.groups_per_step * config.group_size * (config.max_lag + 1)
    limit: int | None = getattr(config.engine, "max_rows", None)
    return asked if limit is None else limit


def _kv_cache(text: Any, rows: int, length: int, width: int) -> Line:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head * width
    grown = length * 3 // 2  # it grows by halves, so that much may be reserved
    return Line(
        name="KV cache",
        bytes=rows * grown * per_token,
        why=f"{rows} rows × {grown:,} tokens (half as much again as the longest) × {per_token:,} bytes",
        when="sampling",
    )


def _base(config: RunConfig, machine: Machine) -> Line:
    if not machine.is_host:
        return Line(name="driver", bytes=DRIVER, why="the accelerator's driver and kernels")
    workers = config.grading.workers
    why = f"Python and its libraries, and {workers} grader process{'es' * (workers > 1)}"
    return Line(name="programs", bytes=LIBRARIES + workers * GRADER, why=why)
