"""Memory plan of a run: its lines, their peak, and whether that fits what is free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.engines.base import ExportsWeights, ReceivesBroadcast, ReportsChecksums
from tandem.errors import DoesNotFit
from tandem.machine import Machine, accelerator, host, readable
from tandem.optimizers.base import LARGE_PIECE, Optimizer
from tandem.trainer.memory_plan.passes import Counts, FakeModel, Layout, Pass
from tandem.trainer.memory_plan.ranks import RankCounts
from tandem.trainer.pairs import has_slices, ranks_of_engine, shards_of

if TYPE_CHECKING:
    from tandem.engines.vllm.spec import Vllm

When = Literal["always", "starting", "running", "sampling", "training", "updating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One line of the plan: a thing that takes memory, and why it takes so much."""

    name: str
    """What it is."""
    bytes: int
    """How much it takes at its largest."""
    why: str
    """How the number comes about."""
    when: When = "always"
    """starting is over before what is running is there; sampling, training and updating are parts of running and take
    turns, unless max_lag lets sampling overlap the others."""
    beside: bool = False
    """It is in the host's memory, and the weights are on an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The lines of a plan, and the free memory that they are held against."""

    lines: tuple[MemoryLine, ...]
    """Everything counted."""
    overlap: bool
    """True if sampling goes on while training does (max_lag above 0)."""
    machine: Machine
    """Where the weights have to fit."""
    beside: Machine | None
    """The host, where the weights are on an accelerator; it is held against its own lines."""
    parameters: int
    """Weights of the model, adapters included."""
    trainable: int
    """Those that are trained."""
    fitted: bool = False
    """What could be chosen was chosen already, so it is no remedy."""

    @property
    def total(self) -> int:
        """Bytes at the peak, where the weights are."""
        return self._peak(line for line in self.lines if not line.beside)

    @property
    def total_beside(self) -> int:
        """Bytes at the peak on the host, where the weights are on an accelerator."""
        return self._peak(line for line in self.lines if line.beside)

    def _peak(self, lines: Iterable[MemoryLine]) -> int:
        """What is always there, and the larger of the start and the run."""
        by: dict[When, int] = dict.fromkeys(get_args(When), 0)
        for line in lines:
            by[line.when] += line.bytes
        step = max(by["training"], by["updating"])
        turns = by["sampling"] + step if self.overlap else max(by["sampling"], step)
        return by["always"] + max(by["starting"], by["running"] + turns)

    @property
    def fits(self) -> bool:
        """True if the peak is within what is free, on the host too."""
        return self.within(1.0)

    def within(self, share: float) -> bool:
        """Whether a share of what is free is enough, on the host too."""
        there = self.beside is None or self.total_beside <= share * self.beside.free
        return self.total <= share * self.machine.free and there

    @property
    def lack(self) -> int:
        """Bytes by which the peaks exceed what is free."""
        there = 0 if self.beside is None else max(0, self.total_beside - self.beside.free)
        return max(0, self.total - self.machine.free) + there

    def largest(self, count: int = 3) -> list[str]:
        """The lines that take most, as text."""
        lines = sorted(self.lines, key=lambda line: -line.bytes)[:count]
        return [f"{line.name} {readable(line.bytes)} ({line.why})" for line in lines]

    def table(self) -> str:
        """The plan as text."""
        both = "both at once" if self.overlap else "sampling and training take turns"
        both *= any(line.when == "sampling" for line in self.lines)  # else an engine samples in its own process
        rows = self._rows(self.machine, [line for line in self.lines if not line.beside], self.total, both)
        if self.beside is not None:
            lines = [line for line in self.lines if line.beside]
            rows += self._rows(self.beside, lines, self.total_beside, "on the host")
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"  {name:<{widths[0]}}  {amount:>{widths[1]}}  {when:<{widths[2]}}  {why}".rstrip()
            for name, amount, when, why in rows
        )

    @staticmethod
    def _rows(where: Machine, lines: list[MemoryLine], total: int, peak: str) -> list[tuple[str, str, str, str]]:
        rows: list[tuple[str, str, str, str]] = [
            (line.name, readable(line.bytes), line.when, line.why) for line in lines
        ]
        free = ("free", readable(where.free), "", f"of {readable(where.total)} on {where.name}")
        return [*rows, ("at the peak", readable(total), "", peak), free]

    def require(self) -> None:
        """Refuse what cannot fit.

        Raises:
            DoesNotFit: with the table and what to change.
        """
        if self.fits:
            return
        where, total = self.machine, self.total
        if total <= where.free and self.beside is not None:
            where, total = self.beside, self.total_beside
        advice = "; ".join(self._remedies(where is self.beside, total)) or "use a smaller model"
        raise DoesNotFit(
            f"this run needs about {readable(total)}, and {where.name} has {readable(where.free)} free:\n"
            f"{self.table()}\nto make it fit: {advice}"
        )

    def _remedies(self, beside: bool, total: int) -> list[str]:
        """What would help most where it does not fit, largest line first."""
        advicefor = {
            "optimizer": self._smaller_states(beside),
            "KV cache": "lower sampling.max_tokens, context or the engine's max_rows",
            "activations": "lower sampling.max_tokens or context"
            if self.fitted
            else "lower micro_batch_tokens, set checkpointing: full, or let memory: fit choose",
            "weights": "choose a smaller model, or dtype: bfloat16",
            "logits": "lower the engine's max_rows",
            "engine": "lower engine.gpu_memory_utilization, or engine.kv_cache_gb where it is set",
            "engine's copy": "use sync: shared, which needs no copy",
            "frozen base": "set trainable.merged: false, or trainable.base_on: host (weights on an accelerator)",
            "buckets": "lower sync.bucket_mb",
            "checkpoint": "have training wait for checkpoints: checkpoint.asynchronous: false",
        }
        largest = sorted((line for line in self.lines if line.beside is beside), key=lambda line: -line.bytes)
        return [advicefor[line.name] for line in largest if line.name in advicefor and line.bytes > total // 10]

    def _smaller_states(self, beside: bool) -> str:
        """What makes an optimizer's states smaller, or brings them elsewhere."""
        ways = ["train an adapter (trainable: lora)" if self.trainable == self.parameters else "lower trainable.rank"]
        if not self.fitted:
            ways.append("take optimizer: adamw8bit")
            ways += ["or adamw_cpu, whose states are on the host"] if self.beside is not None and not beside else []
        return ", ".join(ways)


ENGINE = 1_700_000_000
"""Bytes of one vLLM engine's processes without weights and cache, measured on Linux with its build for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a run, as the plan counts them; those that run already are not counted."""

    apart: bool
    """They sample in processes of their own."""
    exported: bool
    """The trainer's weights are those in an engine's memory."""
    started: int = 0
    """How many are started on this machine."""
    near: int = 0
    """How many of these are where the trainer's weights are: on its accelerator, or on the host."""
    ranks: int = 1
    """Into how many slices each of these cuts its weights."""
    held: int = 1
    """How many of the slices are where the trainer's weights are."""
    share: float = 0.0
    """Share of the accelerator that each near one fills, weights and cache; 0 where they are counted apart."""
    sleeps: int = 0
    """How deep they sleep while a step is trained."""
    cache: int = 0
    """Bytes of keys and values beside each slice, where they are counted apart."""

    @classmethod
    def of(cls, config: RunConfig, machine: Machine, resumed: Path | None, ranks: RankCounts) -> Engines:
        """Those of a recipe, or those that the run in ``resumed`` left running."""
        apart = ReportsChecksums in config.engine.capabilities
        exported = apart and config.sync.capability is ExportsWeights
        if not apart:
            return cls(apart=False, exported=False)
        from tandem.engines.vllm.spec import CPU_CACHE_GB, Vllm

        engine = config.engine
        left = resumed is not None and any(_runs(file) for file in resumed.glob("engine-*.json"))
        if not isinstance(engine, Vllm) or engine.urls or left:
            return cls(apart=True, exported=exported)
        apart_from_share = machine.is_host or engine.kv_cache_gb > 0
        started = engine.replicas
        if ranks.world > 1 and has_slices(config):  # one for so many ranks, of which a card has one
            started = max(1, ranks.local // engine.tensor_parallel_size)
        near = started if machine.is_host else engine.replicas
        return cls(
            apart=True,
            exported=exported,
            started=started,
            near=near if machine.is_host or exported else _on_our_card(engine),
            ranks=engine.tensor_parallel_size,
            held=engine.tensor_parallel_size if machine.is_host else 1,
            sleeps=engine.sleep,
            share=0.0 if apart_from_share else engine.gpu_memory_utilization,
            cache=int((engine.kv_cache_gb or CPU_CACHE_GB) * 1e9) if apart_from_share else 0,
        )

    @property
    def weights_counted(self) -> bool:
        """True if what an engine lends is part of another line, or of what is not free."""
        return not self.near or self.share > 0

    def lines(self, weights: int, machine: Machine) -> list[MemoryLine]:
        """What they take where the trainer's weights are.

        Args:
            weights: bytes of one whole copy of what they load.
            machine: where that is.
        """
        if not self.apart:
            return []
        if not self.near:
            why = "it runs already, or elsewhere: what it holds is not among what is free here"
            return [MemoryLine(name="engine", bytes=0, why=why)]
        when: When = "sampling" if self.sleeps else "always"
        copy = weights * self.held // self.ranks
        lines = []
        if self.sleeps == 1:
            why = _times(self.near, f"its weights of {readable(copy)} while it sleeps")
            lines.append(MemoryLine(name="engine asleep", bytes=self.near * copy, why=why, beside=True))
        if self.share:
            why = f"gpu_memory_utilization {self.share:g} of {readable(machine.total)}, for its weights and cache"
            held = int(self.near * self.share * machine.total)
            return [MemoryLine(name="engine", bytes=held, why=_times(self.near, why), when=when), *lines]
        slices = self.near * self.held
        why = _times(slices, f"keys and values of {readable(self.cache)}")
        lines.append(MemoryLine(name="engine", bytes=slices * self.cache, why=why, when=when))
        if not self.exported:
            why = _times(self.near, f"its own weights of {readable(copy)}, where new ones are sent to")
            lines.append(MemoryLine(name="engine's copy", bytes=self.near * copy, why=why, when=when))
        return lines


def _times(number: int, what: str) -> str:
    return f"{number} × {what}" if number > 1 else what


def _on_our_card(engine: Vllm) -> int:
    """How many replicas have the trainer's accelerator, which is the first that it sees."""
    if not engine.devices:
        return engine.replicas
    ours = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    return sum(ours in [device.strip() for device in devices.split(",")] for devices in engine.devices)


def _runs(file: Path) -> bool:
    """Whether the engine of a record still runs."""
    from tandem.engines.vllm.client.process import EngineRecord
    from tandem.processes import alive_after

    record = EngineRecord.read(file)
    return record is not None and alive_after(record.pid, record.started)


_PIECE = 1 << 22
"""Numbers of a weight that are widened at once."""
_BYTES = {"adamw": 0, "adamw8bit": 17, "adafactor": 0, "adamw_cpu": 0}
"""Of each number that is updated at once, where weights are float32 or have a float32 master."""
_WIDENED = {
    "adamw": {"stochastic": 12},
    "adamw8bit": {"stochastic": 21},
    "adafactor": {"stochastic": 12},
}
"""The same by what keeps narrow weights precise."""


def update_bytes(optimizer: Optimizer, largest: int, width: int, *, is_host: bool = True) -> int:
    """Bytes at the peak of an update, beside what the optimizer keeps; 0 for a kind that is not Tandem's own.

    Args:
        optimizer: the recipe's.
        largest: numbers in the largest trained tensor.
        width: bytes of one of them.
        is_host: weights are in the host's memory.
    """
    kind = resolve.kind_of("optimizers", optimizer)
    precision = getattr(optimizer, "precision", "masters") if width < 4 else "masters"
    each = _WIDENED.get(kind, {}).get(precision, _BYTES.get(kind, 0))
    gradient = 4 if width < 4 and getattr(optimizer, "gradients", "float32") == "bfloat16" else 0  # widened to be read
    piece = min(largest, _PIECE if is_host or kind != "adamw8bit" else LARGE_PIECE)
    if kind == "adafactor":  # its means need all of a tensor; only what narrows it again goes by pieces
        own = 0 if precision == "masters" else 4 * largest + (each - 4) * piece
        return own + gradient * largest
    return piece * (each + gradient)


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
PINNED = 1.4
"""Pinned memory for each byte of a tensor: torch rounds a piece of it up to a power of two. Measured, 1.42."""
TYPICAL_PROMPT = 256
"""Tokens of a prompt where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans the memory of a recipe on a machine."""

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
    ranks: RankCounts = field(default_factory=RankCounts)
    """How many ranks the states are divided over."""

    def plan(self, config: RunConfig) -> MemoryPlan:
        """Every line of a run."""
        machine, counts = self.machine, self.modelled.counts
        engines = Engines.of(config, machine, self.resumed, self.ranks)
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
        if self.ranks.world > 1 and config.distributed.shard == "weights":
            lines = _cut(lines, self.ranks, config, counts, engines, is_host=machine.is_host)
        return MemoryPlan(
            lines=(*_divided(lines, self.ranks, config, counts, is_host=machine.is_host), *self._staged(config)),
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

    def _staged(self, config: RunConfig) -> list[MemoryLine]:
        """Copies of what is saved, on the host, where a checkpoint is written while training goes on."""
        saving, is_host, ranks = config.checkpoint, self.machine.is_host, self.ranks
        if saving.save == "none" or saving.asynchronous is False or (saving.asynchronous == "auto" and is_host):
            return []
        counts, width = self.modelled.counts, _width(config)
        amount = counts.trainable * width
        if saving.save == "all":
            gradient = 2 if getattr(config.optimizer, "gradients", "float32") == "bfloat16" else 4  # which is not saved
            whole = self.checkpoint_bytes(config)
            states = config.optimizer.state_bytes(counts.trainable, width) - gradient * counts.trainable
            shared_by = shards_of(config, ranks.world) if config.trainable.folder_name == "model" else 1
            amount = whole - gradient * counts.trainable - states + states * ranks.local // shared_by
        why = "copies of weights and states, while they are written"
        if not is_host:
            amount, why = int(amount * PINNED), f"{why}: {PINNED:g} times their size, in pinned memory"
        return [MemoryLine(name="checkpoint", bytes=amount, why=why, when="running", beside=not is_host)]

    def longest(self, config: RunConfig) -> tuple[int, int]:
        """Tokens of the longest prompt, and of what may follow it."""
        # What environments of several turns call their limit.
        turns = max((getattr(source.env, "max_turns", 1) for source in config.sources.values()), default=1)
        room = max(1, context(config, self.model_config) - self.prompt_tokens)
        return self.prompt_tokens, min(room, turns * config.sampling.max_tokens)

    def longest_part(self, config: RunConfig) -> tuple[int, int]:
        """What a rank computes of the longest prompt and answer: all of it, or its part where ranks share sequences."""
        prompt, answer = self.longest(config)
        shared = config.distributed.context_parallel
        return -(-prompt // shared), -(-answer // shared)

    def step_tokens(self, config: RunConfig) -> int:
        """Tokens of a step whose answers are all of the longest; a rank's part of them where ranks share sequences."""
        prompt, answer = self.longest(config)
        whole = config.groups_per_step * (prompt + config.group_size * (answer - 1))
        return -(-whole // config.distributed.context_parallel)

    def _training(self, config: RunConfig) -> list[MemoryLine]:
        """What a forward and backward take."""
        prompt, answer = self.longest_part(config)
        budget = min(config.micro_batch_tokens, self.step_tokens(config))
        layout = Layout.of(tokens=budget, prompt=prompt, answer=answer, siblings=config.group_size)
        each_pass = self.modelled.run(config, layout)
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
            unsaved = self.modelled.run(replace(config, checkpointing="none"), layout)
            remade = max(0, unsaved.total - each_pass.total)
            why += f", {REMADE:.0%} of {readable(remade)} that are made again"
        why += ": holes that the allocator cannot use at once"
        return MemoryLine(name="slack", bytes=int(SLACK * each_pass.total + REMADE * remade), why=why, when="training")

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
    """Memory planner of a recipe.

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
        ranks=RankCounts.of(config),
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
    """The trainer's weights, or the engine's to which it attaches, what is kept beside them, and the engines'."""
    width = _width(config)
    whole, base = counts.parameters * width, counts.base * width
    if engines.exported:
        lines = _attached_lines(whole, base, machine, engines)
    else:
        lines = [MemoryLine(name="weights", bytes=whole, why=f"{counts.parameters:,} parameters × {width} bytes")]
    for kept, beside in ((counts.kept, False), (counts.kept_on_host, True)):
        if kept:
            why = "the adapted layers' own weights, kept beside the merged ones"
            lines.append(MemoryLine(name="frozen base", bytes=kept, why=why, beside=beside))
    return [*lines, *engines.lines(base, machine)]


def _attached_lines(whole: int, base: int, machine: Machine, engines: Engines) -> list[MemoryLine]:
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
    if config.sync.capability is not ReceivesBroadcast:
        return []
    sync: Any = config.sync
    width = _width(config)
    each = min(max(sync.bucket_mb << 20, counts.largest * width), counts.trainable * width)
    beside = not machine.is_host and sync.backend == "gloo"
    ends = 1 + engines.near * engines.held
    why = f"two of {readable(each)} at each of {ends} ends of the broadcast"
    return [MemoryLine(name="buckets", bytes=2 * ends * each, why=why, beside=beside)]


_EVERY_RANKS = (
    "weights",
    "adapter",
    "frozen base",
    "activations",
    "logprobs",
    "gradients",
    "slack",
    "reference",
    "update",
    "shards",
    "gathered layers",
)
"""Lines that each rank of a host has; the lead alone samples, grades and starts engines."""
_EVERY_GPUS = (*_EVERY_RANKS, "optimizer", "driver", "engine", "engine's copy")
"""Lines that are on a GPU once for each of its ranks: each has an engine there."""
_SUM_BYTES = 4
"""Of one gradient on its way between ranks: float32."""


def _divided(
    lines: Sequence[MemoryLine], counts: RankCounts, config: RunConfig, modelled: Counts, *, is_host: bool
) -> list[MemoryLine]:
    """The lines of a plan for an accelerator and its ranks; on a host, and of what lies there, for all ranks of it.

    Args:
        lines: of a run of one rank.
        counts: how many there are.
        config: the recipe; an adapter's states are whole on every rank.
        modelled: parameters of the model.
        is_host: the weights are in the host's memory.
    """
    if counts.world == 1:
        return list(lines)
    parts = shards_of(config, counts.world) if config.trainable.folder_name == "model" else 1
    divided_lines = []
    for line in lines:
        own = line
        if line.name == "optimizer" and parts > 1:
            why = f"1/{parts} of {line.why}: gradients, masters and moments of a rank"
            own = replace(line, bytes=line.bytes // parts, why=why)
        here = is_host or own.beside
        if here and counts.local > 1 and own.name in (*_EVERY_RANKS, "optimizer"):
            own = replace(own, bytes=own.bytes * counts.local, why=f"{counts.local} ranks × {own.why}")
        elif not here and counts.per_gpu > 1 and own.name in _EVERY_GPUS:
            own = replace(own, bytes=own.bytes * counts.per_gpu, why=f"{counts.per_gpu} ranks × {own.why}")
        divided_lines.append(own)
    return [*divided_lines, *_sums(config, modelled, counts.local if is_host else counts.per_gpu)]


def _sums(config: RunConfig, counts: Counts, ranks_here: int) -> list[MemoryLine]:
    """Gradients that are summed over ranks, of those that share this memory."""
    from tandem.distributed.gradient_sums import BUCKET, IN_FLIGHT

    is_local = config.distributed.gradients == "local"
    if config.distributed.shard == "weights":  # what FSDP has on the way is among the gathered layers
        why = "whole float32 gradients that each rank has added up, until a pass's last micro-batch"
        size = counts.trainable * _SUM_BYTES * ranks_here
        return [MemoryLine(name="gradient sums", bytes=size, why=why, when="training")] if is_local else []
    if is_local:
        amount, name = counts.trainable + IN_FLIGHT * counts.largest, "gradient sums"
        why = "float32 gradients that each rank has added up, and those on their way to the ranks that own them"
    else:
        amount, name = 2 * IN_FLIGHT * BUCKET, "gradient buckets"
        why = f"{IN_FLIGHT} buckets of float32 gradients on their way to the ranks that own them, and what is in them"
    return [MemoryLine(name=name, bytes=amount * _SUM_BYTES * ranks_here, why=why, when="training")]


def _cut(
    lines: Sequence[MemoryLine],
    ranks: RankCounts,
    config: RunConfig,
    counts: Counts,
    engines: Engines,
    *,
    is_host: bool,
) -> list[MemoryLine]:
    """The lines of one rank of several whose weights are cut, before states are divided.

    With an engine in a process of its own no rank has whole weights once it has started; else the lead has them.
    """
    width, num_shards = _width(config), shards_of(config, ranks.world)
    wide = counts.parameters - (counts.trainable if width < _SUM_BYTES else 0)  # masters are among the states
    shards = MemoryLine(
        name="shards",
        bytes=wide * _SUM_BYTES // num_shards,
        why=f"1/{num_shards} of {wide:,} float32 parameters that are no masters",
    )
    is_local = config.distributed.gradients == "local"
    stay = counts.base if is_local else 2 * counts.layer + counts.outside
    gathered = MemoryLine(
        name="gathered layers",
        bytes=stay * width + (counts.layer + counts.outside) * _SUM_BYTES,
        why=("all weights, until a pass is over" if is_local else "weights of two layers, embeddings and head")
        + ", and float32 gradients of one layer, embeddings and head on their way",
        when="training",
    )
    kept = [line for line in lines if line.name not in ("weights", "loading")]
    if not engines.exported:
        return [*lines, *([shards] if wide else []), gathered]
    whole = counts.base * width
    workers = ranks_of_engine(config)
    slices = MemoryLine(
        name="weights",
        bytes=0 if engines.weights_counted else whole // workers,
        why=f"1/{workers} of {readable(whole)}, the slices of the engine's worker"
        + ": part of what the engine holds" * engines.weights_counted,
    )
    loading = MemoryLine(
        name="loading",
        bytes=whole * (1 + is_host * max(1, engines.started)),
        why="the whole model as the lead loads it, before all ranks take their parts"
        + ", and the engine's before it is in shared memory" * is_host,
        when="starting",
        beside=not is_host,
    )
    saving = MemoryLine(
        name="saving",
        bytes=whole,
        why="all weights in the lead's process while it writes a checkpoint",
        when="updating",
        beside=not is_host,
    )
    return [slices, *([shards] if wide else []), gathered, loading, saving, *kept]


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
