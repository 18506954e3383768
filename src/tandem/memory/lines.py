"""What a run holds in memory, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config import RunConfig
from tandem.engines.base import CanReceive
from tandem.machine import Machine, accelerator, host, readable
from tandem.memory.engines import ENGINE, Engines
from tandem.memory.table import Line, MemoryPlan

LIBRARIES = 700_000_000
"""Bytes of Python with torch and transformers imported, measured on Linux."""
GRADER = 150_000_000
"""Bytes of one grader process."""
DRIVER = 600_000_000
"""Bytes that an accelerator's driver and kernels take."""
TYPICAL_PROMPT = 256
"""Tokens of a prompt where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of a model as it is trained."""

    parameters: int
    trainable: int
    largest: int  # of the trained tensors
    base: int  # those that an engine lends: all but an adapter's
    kept: int  # bytes of frozen weights kept beside those that are sampled from, where these are
    kept_on_host: int  # those of them that are kept on the host


def plan(
    config: RunConfig,
    model_config: Any,
    machine: Machine | None = None,
    beside: Machine | None = None,
    *,
    prompt_tokens: int = TYPICAL_PROMPT,
    resumed: Path | None = None,
) -> MemoryPlan:
    """Estimate a run's memory.

    Args:
        config: the run.
        model_config: the model's transformers configuration; no weight is loaded.
        machine: where it has to fit; by default the accelerator, or else the host.
        beside: the host, where ``machine`` is an accelerator.
        prompt_tokens: tokens of the longest prompt.
        resumed: folder of a run that is gone on with; an engine that it left running has its memory already.
    """
    machine = machine or accelerator() or host()
    beside = None if machine.is_host else beside or host()
    width = _width(config)
    counts = _counts(config, model_config, machine.is_host)
    engines = Engines.of(config, machine, resumed)
    lines = [
        *_programs(config, machine, engines),
        *_weights(config, counts, machine, engines),
        *_buckets(config, counts, machine, engines),
        _optimizer(config, counts, machine),
        *_reference(config, counts),
        Line(
            name="gradients",
            bytes=2 * counts.largest * width,
            why=f"twice the largest tensor, {counts.largest:,} × {width} bytes; each goes to the optimizer at once",
            when="training",
        ),
        *_working(config, model_config, machine, engines, prompt_tokens),
    ]
    return MemoryPlan(
        lines=tuple(lines),
        overlap=config.max_lag > 0,
        machine=machine,
        beside=beside,
        parameters=counts.parameters,
        trainable=counts.trainable,
    )


def context(config: RunConfig, model_config: Any) -> int:
    """Most tokens of a prompt and its answer together."""
    own: int = model_config.get_text_config().max_position_embeddings
    return own if config.context is None else min(config.context, own)


def checkpoint_bytes(config: RunConfig, model_config: Any) -> int:
    """Bytes of one checkpoint on disk, at most: what is trained and the optimizer's state."""
    _, trainable, _ = count(config, model_config)
    width = _width(config)
    reference = (
        _reference(config, _counts(config, model_config, True)) if getattr(config.reference, "saved", False) else []
    )
    return trainable * width + config.optimizer.state_bytes(trainable, width) + sum(line.bytes for line in reference)


def count(config: RunConfig, model_config: Any) -> tuple[int, int, int]:
    """Parameters of the model, those trained, and those of the largest trained tensor; nothing is allocated."""
    found = _counts(config, model_config, True)
    return found.parameters, found.trainable, found.largest


def _counts(config: RunConfig, model_config: Any, on_host: bool) -> _Counts:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, config.dtype))
        model = config.trains.prepare(model)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    kept = config.trains.kept_bytes(model, on_host=on_host)
    return _Counts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(trained),
        largest=max(trained),
        base=sum(parameter.numel() for parameter in config.trains.base_names(model).values()),
        kept=kept,
        kept_on_host=config.trains.kept_bytes(model, on_host=True) - kept,
    )


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


def _working(
    config: RunConfig, model_config: Any, machine: Machine, engines: Engines, prompt_tokens: int
) -> list[Line]:
    """What a training pass and, in this process, sampling take."""
    text = model_config.get_text_config()
    # What environments of several turns call their limit.
    turns = max((getattr(source.env, "max_turns", 1) for source in config.sources.values()), default=1)
    length = min(context(config, model_config), prompt_tokens + turns * config.sampling.max_tokens)
    tokens = max(config.micro_batch_tokens, length)
    width = _width(config)
    per_token = activation_bytes(text, width, machine.is_host)
    activations = Line(
        name="activations",
        bytes=tokens * per_token,
        why=f"one micro-batch: {tokens:,} tokens × {per_token:,} bytes",
        when="training",
    )
    if engines.apart:
        return [activations]
    rows = _rows(config)
    logits = Line(
        name="logits",
        bytes=rows * text.vocab_size * 4 * 3,
        why=f"{rows} rows × {text.vocab_size:,} tokens × 4 bytes, and two copies to choose from",
        when="sampling",
    )
    return [activations, _kv_cache(text, rows, length, width), logits]


def _optimizer(config: RunConfig, counts: _Counts, machine: Machine) -> Line:
    amount = config.optimizer.state_bytes(counts.trainable, _width(config))
    return Line(
        name="optimizer",
        bytes=amount,
        why=f"{counts.trainable:,} trained parameters × {amount / counts.trainable:.0f} bytes",
        when="running",
        beside=config.optimizer.states_on == "host" and not machine.is_host,
    )


def _reference(config: RunConfig, counts: _Counts) -> list[Line]:
    """A second copy of what the model computes with and training changes."""
    if config.reference is None:
        return []
    amount = (counts.kept + counts.kept_on_host) or counts.trainable * _width(config)
    return [Line(name="reference", bytes=amount, why="a second copy of the weights that training changes")]


def _weights(config: RunConfig, counts: _Counts, machine: Machine, engines: Engines) -> list[Line]:
    """The trainer's weights, or those it is lent, what is kept beside them, and the engines'."""
    width = _width(config)
    whole, base = counts.parameters * width, counts.base * width
    if engines.lent:
        lines = _borrowed(whole, base, machine, engines)
    else:
        lines = [Line(name="weights", bytes=whole, why=f"{counts.parameters:,} parameters × {width} bytes")]
    for kept, beside in ((counts.kept, False), (counts.kept_on_host, True)):
        if kept:
            why = "the adapted layers' own weights, kept beside the merged ones"
            lines.append(Line(name="frozen base", bytes=kept, why=why, beside=beside))
    return [*lines, *engines.lines(base, machine)]


def _borrowed(whole: int, base: int, machine: Machine, engines: Engines) -> list[Line]:
    """One copy of the weights in an engine's memory, and the adapter beside it."""
    why = f"{readable(base)}, one copy for trainer and engine"
    if engines.weights_counted:
        weights = Line(name="weights", bytes=0, why=f"{why}: part of what the engine holds")
    else:
        weights = Line(name="weights", bytes=base, why=why)
    adapter = [Line(name="adapter", bytes=whole - base, why="its tensors, which the trainer holds")]
    why = "the model as the trainer loads it, before it takes the engine's instead"
    copies = 1
    if machine.is_host and engines.near:
        copies, why = 2, f"{why}, and the engine's before they are in shared memory"
    loading = Line(name="loading", bytes=copies * base, why=why, when="starting", beside=not machine.is_host)
    return [weights, *(adapter if whole > base else []), loading]


def _buckets(config: RunConfig, counts: _Counts, machine: Machine, engines: Engines) -> list[Line]:
    """Buffers of a broadcast."""
    if config.sync.port is not CanReceive:
        return []
    sync: Any = config.sync
    width = _width(config)
    each = min(max(sync.bucket_mb << 20, counts.largest * width), counts.trainable * width)
    beside = not machine.is_host and sync.backend == "gloo"
    ends = 1 + engines.near * engines.held
    why = f"two of {readable(each)} at each of {ends} ends of the broadcast"
    return [Line(name="buckets", bytes=2 * ends * each, why=why, beside=beside)]


def _programs(config: RunConfig, machine: Machine, engines: Engines) -> list[Line]:
    workers = config.grading.workers * max(1, len(config.sources))
    parts = ["Python and its libraries", f"{workers} grader process{'es' * (workers > 1)}"]
    if engines.started:
        parts.append(f"{engines.started} engine{'s' * (engines.started > 1)} of {readable(ENGINE)}")
    why = ", and ".join([", ".join(parts[:-1]), parts[-1]])
    amount = LIBRARIES + workers * GRADER + engines.started * ENGINE
    programs = Line(name="programs", bytes=amount, why=why, beside=not machine.is_host)
    if machine.is_host:
        return [programs]
    drivers = 1 + engines.near
    why = "the accelerator's driver and kernels" + f", in {drivers} processes" * (drivers > 1)
    return [Line(name="driver", bytes=drivers * DRIVER, why=why), programs]
