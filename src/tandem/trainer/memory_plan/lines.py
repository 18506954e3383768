"""What a run holds in memory, line by line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.config.loading import RunConfig
from tandem.engines.base import CanReceive
from tandem.machine import Machine, accelerator, host, readable
from tandem.trainer.memory_plan.engines import ENGINE, Engines
from tandem.trainer.memory_plan.passes import Counts, FakeModel, Layout, Pass
from tandem.trainer.memory_plan.table import MemoryLine, MemoryPlan
from tandem.trainer.memory_plan.updates import update_bytes

LIBRARIES = 700_000_000
"""Bytes of Python with torch and transformers imported, measured on Linux."""
GRADER = 150_000_000
"""Bytes of one grader process."""
DRIVER = 600_000_000
"""Bytes that an accelerator's driver and kernels take."""
SLACK = 0.4
"""Share by which a pass on a CPU holds more than its live tensors. torch asks glibc for aligned memory, which is cut
out of a hole larger than what is asked for, and small objects take the cuttings: the hole that a tensor leaves is too
small for the next one of its size. Measured with glibc 2.36, 0.28 to 0.48; with MALLOC_MMAP_THRESHOLD_=65536 there are
none, and a step took 1.6 times as long."""
REMADE = 0.6
"""The same of what checkpointing does not keep: made again layer by layer, it leaves such holes. 0.50 to 0.72."""
TYPICAL_PROMPT = 256
"""Tokens of a prompt where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Everything about a run that its memory depends on and ``fit`` does not choose."""

    modelled: FakeModel
    """The model, built once without memory."""
    model_config: Any
    """The model's transformers configuration."""
    machine: Machine
    """Where the run has to fit."""
    beside: Machine | None
    """The host, where ``machine`` is an accelerator."""
    prompt_tokens: int = TYPICAL_PROMPT
    """Of the longest prompt."""
    resumed: Path | None = None
    """Folder of a run that is gone on with; an engine that it left running has its memory already."""
    _passes: dict[tuple[Layout, str], Pass] = field(default_factory=dict)

    def plan(self, config: RunConfig) -> MemoryPlan:
        """Every line of a run."""
        machine, counts = self.machine, self.modelled.counts
        engines = Engines.of(config, machine, self.resumed)
        lines = [
            *_programs(config, machine, engines),
            *_weights(config, counts, machine, engines),
            *_buckets(config, counts, machine, engines),
            _optimizer(config, counts, machine),
            *_reference(config, counts),
            *self._training(config),
            *_update(config, counts, machine),
            *self._sampling(config, engines),
        ]
        return MemoryPlan(
            lines=tuple(lines),
            overlap=config.most_lag > 0,
            machine=machine,
            beside=self.beside,
            parameters=counts.parameters,
            trainable=counts.trainable,
        )

    def checkpoint_bytes(self, config: RunConfig) -> int:
        """Bytes of one checkpoint on disk, at most: what is trained and the optimizer's state."""
        counts, width = self.modelled.counts, _width(config)
        reference = _reference(config, counts) if getattr(config.reference, "saved", False) else []
        states = config.optimizer.state_bytes(counts.trainable, width)
        return counts.trainable * width + states + sum(line.bytes for line in reference)

    def longest(self, config: RunConfig) -> tuple[int, int]:
        """Tokens of the longest prompt, and of what may follow it."""
        # What environments of several turns call their limit.
        turns = max((getattr(source.env, "max_turns", 1) for source in config.sources.values()), default=1)
        room = max(1, context(config, self.model_config) - self.prompt_tokens)
        return self.prompt_tokens, min(room, turns * config.sampling.max_tokens)

    def step_tokens(self, config: RunConfig) -> int:
        """Tokens of a step whose answers are all of the longest."""
        prompt, answer = self.longest(config)
        return config.groups_per_step * (prompt + config.group_size * (answer - 1))

    def _training(self, config: RunConfig) -> list[MemoryLine]:
        """What a forward and backward take."""
        prompt, answer = self.longest(config)
        budget = min(config.micro_batch_tokens, self.step_tokens(config))
        layout = Layout.of(tokens=budget, prompt=prompt, answer=answer, siblings=config.group_size)
        each_pass = self._pass(config, layout)
        kept = {"none": "all", "selective": "products and attention", "full": "each layer's input, and one layer"}
        each = each_pass.activations // layout.tokens
        what = f"one micro-batch: {layout.tokens:,} tokens × {each:,} bytes, of {kept[config.checkpointing]}"
        lines = [MemoryLine(name="activations", bytes=each_pass.activations, why=what, when="training")]
        why = f"tiles of logits of {layout.trained:,} trained tokens, and what goes with them"
        lines.append(MemoryLine(name="logprobs", bytes=each_pass.logits, why=why, when="training"))
        why = "the largest on their way at once; each weight's goes to the optimizer as soon as it is whole"
        lines.append(MemoryLine(name="gradients", bytes=each_pass.gradients, why=why, when="training"))
        if self.machine.is_host:
            lines.append(self._slack(config, layout, each_pass))
        return lines

    def _slack(self, config: RunConfig, layout: Layout, each_pass: Pass) -> MemoryLine:
        """Holes that a pass on a CPU leaves."""
        why = f"{SLACK:.0%} of what is made and freed"
        remade = 0
        if config.checkpointing != "none":
            remade = max(0, self._pass(replace(config, checkpointing="none"), layout).total - each_pass.total)
            why += f", {REMADE:.0%} of {readable(remade)} that are made again"
        why += ": holes that the allocator cannot use at once"
        return MemoryLine(name="slack", bytes=int(SLACK * each_pass.total + REMADE * remade), why=why, when="training")

    def _pass(self, config: RunConfig, layout: Layout) -> Pass:
        """What a forward and backward take, found once."""
        key = (layout, config.checkpointing)
        if key not in self._passes:
            self._passes[key] = self.modelled.run(config, layout)
        return self._passes[key]

    def _sampling(self, config: RunConfig, engines: Engines) -> list[MemoryLine]:
        """What sampling in this process takes."""
        if engines.apart:
            return []
        text = self.model_config.get_text_config()
        rows = _rows(config)
        penalised = config.sampling.penalised
        why = f"{rows} rows × {text.vocab_size:,} tokens × 4 bytes, and two copies to choose from"
        why += ", and four of what is counted for penalties" if penalised else ""
        copies = 7 if penalised else 3
        logits = MemoryLine(name="logits", bytes=rows * text.vocab_size * 4 * copies, why=why, when="sampling")
        return [_kv_cache(text, rows, sum(self.longest(config)), _width(config)), logits]


def planner(
    config: RunConfig,
    model_config: Any,
    machine: Machine | None = None,
    beside: Machine | None = None,
    *,
    prompt_tokens: int = TYPICAL_PROMPT,
    resumed: Path | None = None,
) -> Planner:
    """What plans a run's memory.

    Args:
        config: the run.
        model_config: the model's transformers configuration; no weight is loaded.
        machine: where it has to fit; by default the accelerator, or else the host.
        beside: the host, where ``machine`` is an accelerator.
        prompt_tokens: tokens of the longest prompt.
        resumed: folder of a run that is gone on with; an engine that it left running has its memory already.
    """
    machine = machine or accelerator() or host()
    return Planner(
        modelled=FakeModel(config, model_config, on_host=machine.is_host),
        model_config=model_config,
        machine=machine,
        beside=None if machine.is_host else beside or host(),
        prompt_tokens=prompt_tokens,
        resumed=resumed,
    )


def context(config: RunConfig, model_config: Any) -> int:
    """Most tokens of a prompt and its answer together."""
    own: int = model_config.get_text_config().max_position_embeddings
    return own if config.context is None else min(config.context, own)


def _width(config: RunConfig) -> int:
    """Bytes of one weight."""
    return 2 if config.dtype == "bfloat16" else 4


def _rows(config: RunConfig) -> int:
    """Sequences the engine samples at once: its own limit, which sizes its cache, or all that may be asked for."""
    rows = config.groups_per_step * config.group_size * (config.most_lag + 1)
    limit: int | None = getattr(config.engine, "max_rows", None)
    return rows if limit is None else limit


def _kv_cache(text: Any, rows: int, length: int, width: int) -> MemoryLine:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head * width
    grown = length * 3 // 2  # it grows by halves, so that much may be reserved
    return MemoryLine(
        name="KV cache",
        bytes=rows * grown * per_token,
        why=f"{rows} rows × {grown:,} tokens (half as much again as the longest) × {per_token:,} bytes",
        when="sampling",
    )


def _optimizer(config: RunConfig, counts: Counts, machine: Machine) -> MemoryLine:
    amount = config.optimizer.state_bytes(counts.trainable, _width(config))
    return MemoryLine(
        name="optimizer",
        bytes=amount,
        why=f"{counts.trainable:,} trained parameters × {amount / counts.trainable:.0f} bytes",
        when="running",
        beside=config.optimizer.states_on == "host" and not machine.is_host,
    )


def _update(config: RunConfig, counts: Counts, machine: Machine) -> list[MemoryLine]:
    """What an optimizer makes while it updates a tensor, and forgets."""
    amount = update_bytes(config.optimizer, counts.largest, _width(config), is_host=machine.is_host)
    if not amount:
        return []
    beside = config.optimizer.states_on == "host" and not machine.is_host
    why = "float32 values of one piece of a weight, and what they are computed from"
    return [MemoryLine(name="update", bytes=amount, why=why, when="updating", beside=beside)]


def _reference(config: RunConfig, counts: Counts) -> list[MemoryLine]:
    """A second copy of what the model computes with and training changes."""
    if config.reference is None:
        return []
    amount = (counts.kept + counts.kept_on_host) or counts.trainable * _width(config)
    return [MemoryLine(name="reference", bytes=amount, why="a second copy of the weights that training changes")]


def _weights(config: RunConfig, counts: Counts, machine: Machine, engines: Engines) -> list[MemoryLine]:
    """The trainer's weights, or those it is lent, what is kept beside them, and the engines'."""
    width = _width(config)
    whole, base = counts.parameters * width, counts.base * width
    if engines.lent:
        lines = _borrowed(whole, base, machine, engines)
    else:
        lines = [MemoryLine(name="weights", bytes=whole, why=f"{counts.parameters:,} parameters × {width} bytes")]
    for kept, beside in ((counts.kept, False), (counts.kept_on_host, True)):
        if kept:
            why = "the adapted layers' own weights, kept beside the merged ones"
            lines.append(MemoryLine(name="frozen base", bytes=kept, why=why, beside=beside))
    return [*lines, *engines.lines(base, machine)]


def _borrowed(whole: int, base: int, machine: Machine, engines: Engines) -> list[MemoryLine]:
    """One copy of the weights in an engine's memory, and the adapter beside it."""
    why = f"{readable(base)}, one copy for trainer and engine"
    if engines.weights_counted:
        weights = MemoryLine(name="weights", bytes=0, why=f"{why}: part of what the engine holds")
    else:
        weights = MemoryLine(name="weights", bytes=base, why=why)
    adapter = [MemoryLine(name="adapter", bytes=whole - base, why="its tensors, which the trainer holds")]
    why = "the model as the trainer loads it, before it takes the engine's instead"
    copies = 1
    if machine.is_host and engines.near:
        copies, why = 2, f"{why}, and the engine's before they are in shared memory"
    loading = MemoryLine(name="loading", bytes=copies * base, why=why, when="starting", beside=not machine.is_host)
    return [weights, *(adapter if whole > base else []), loading]


def _buckets(config: RunConfig, counts: Counts, machine: Machine, engines: Engines) -> list[MemoryLine]:
    """Buffers of a broadcast."""
    if config.sync.capability is not CanReceive:
        return []
    sync: Any = config.sync
    width = _width(config)
    each = min(max(sync.bucket_mb << 20, counts.largest * width), counts.trainable * width)
    beside = not machine.is_host and sync.backend == "gloo"
    ends = 1 + engines.near * engines.held
    why = f"two of {readable(each)} at each of {ends} ends of the broadcast"
    return [MemoryLine(name="buckets", bytes=2 * ends * each, why=why, beside=beside)]


def _programs(config: RunConfig, machine: Machine, engines: Engines) -> list[MemoryLine]:
    workers = config.grading.processes(config.groups_per_step) * max(1, len(config.sources))
    parts = ["Python and its libraries", f"{workers} grader process{'es' * (workers > 1)}"]
    if engines.started:
        parts.append(f"{engines.started} engine{'s' * (engines.started > 1)} of {readable(ENGINE)}")
    why = ", and ".join([", ".join(parts[:-1]), parts[-1]])
    amount = LIBRARIES + workers * GRADER + engines.started * ENGINE
    programs = MemoryLine(name="programs", bytes=amount, why=why, beside=not machine.is_host)
    if machine.is_host:
        return [programs]
    drivers = 1 + engines.near
    why = "the accelerator's driver and kernels" + f", in {drivers} processes" * (drivers > 1)
    return [MemoryLine(name="driver", bytes=drivers * DRIVER, why=why), programs]
