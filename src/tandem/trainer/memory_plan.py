"""Memory plan of a run: a table of what takes memory, its peak, and whether that fits what is free.

Weights, states and an engine's share follow from counts, activations from one forward pass on torch's meta device, and
the rest from constants that ``benchmarks/memory.py`` measures. The peak is right to ``MARGIN``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tandem.config.loading import RunConfig
from tandem.engines.base import ReportsChecksums
from tandem.errors import DoesNotFit, TandemError, message_of
from tandem.lazy import Tensor, torch
from tandem.machine import Machine, accelerator, host, readable
from tandem.trainer import pairs

When = Literal["always", "starting", "running", "sampling", "training"]

MARGIN = 0.15
"""Share by which a plan may be off."""
LIBRARIES = 700_000_000
"""Bytes of Python with torch and transformers imported."""
GRADER = 150_000_000
"""Bytes of one grader process."""
ENGINE = 1_700_000_000
"""Bytes of one vLLM engine's processes without weights and cache."""
DRIVER = 600_000_000
"""Bytes that an accelerator's driver and kernels take in one process."""
SLACK, REMADE = 0.4, 0.6
"""Holes that a pass on a CPU leaves, of each byte made, and of each byte that checkpointing makes again: glibc cuts
torch's aligned memory out of larger holes, and a freed one is too small for the next tensor of its size."""
PINNED = 1.4
"""Pinned memory of each byte of a tensor: torch rounds pieces up to a power of two."""
SELECTIVE = 0.5
"""Share of activations that selective checkpointing keeps."""
TRAINED_LOGIT, FROZEN_LOGIT = 11, 17
"""Bytes of each logit of a tile, with a trained head and with a frozen one."""
TYPICAL_PROMPT = 256
"""Tokens of a prompt where none was measured."""

_PHRASES = re.compile(
    r"out of memory|can't allocate memory|No available memory for the cache blocks|less than desired GPU memory", re.I
)
"""What torch, its CPU allocator and vLLM say of it, quoted in an error of an engine or another rank too."""

OPTIONS = {
    "weights": "a smaller model, or dtype: bfloat16",
    "optimizer": "trainable: lora, optimizer: adamw8bit, or adamw_cpu, whose states are on the host",
    "reference": "reference: null",
    "frozen base": "trainable.merged: false",
    "activations": "a lower micro_batch_tokens or checkpointing: full",
    "slack": "a lower micro_batch_tokens",
    "gradients": "trainable: lora",
    "gradient sums": "distributed.gradients: scattered",
    "KV cache": "a lower sampling.max_tokens, context or engine.max_rows",
    "engine": "a lower engine.gpu_memory_utilization or engine.kv_cache_gb",
    "engine's copy": "sync: shared, which needs no copy",
    "checkpoint": "checkpoint.asynchronous: false",
    "programs": "a lower grading.workers",
}
"""What makes a line smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One thing that takes memory, and why it takes so much."""

    name: str
    """What it is."""
    bytes: int
    """How much it takes at its largest."""
    why: str
    """How the number comes about."""
    when: When = "always"
    """starting is over before what is running is there; sampling and training are parts of running and take turns,
    unless max_lag lets them overlap."""
    beside: bool = False
    """It is in the host's memory, and the weights are on an accelerator."""

    def __str__(self) -> str:
        change = f"; less by {OPTIONS[self.name]}" if self.name in OPTIONS else ""
        return f"{self.name} {readable(self.bytes)} ({self.why}){change}"


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

    @property
    def total(self) -> int:
        """Bytes at the peak, where the weights are."""
        return sum(line.bytes for line in self.at_peak())

    def at_peak(self, *, beside: bool = False) -> list[MemoryLine]:
        """What is there at the peak, largest first: where the weights are, or on the host beside it."""
        turns = [("sampling", "training")] if self.overlap else [("sampling",), ("training",)]
        moments = [("always", "starting"), *(("always", "running", *turn) for turn in turns)]
        lines = sorted((line for line in self.lines if line.beside is beside), key=lambda line: -line.bytes)
        return max(([line for line in lines if line.when in moment] for moment in moments), key=_sum)

    def within(self, share: float = 1.0) -> bool:
        """Whether a share of what is free is enough, on the host too."""
        beside = self.beside is None or _sum(self.at_peak(beside=True)) <= share * self.beside.free
        return self.total <= share * self.machine.free and beside

    def table(self) -> str:
        """The peak, what is free, and the three largest lines, of each machine."""
        places = [self.machine] if self.beside is None else [self.machine, self.beside]
        rows = []
        for machine, lines in zip(places, (self.at_peak(), self.at_peak(beside=True)), strict=False):
            free = f"{readable(machine.free)} free on {machine.name}"
            rows.append(f"{readable(_sum(lines))} at the peak, {free}; most of it:")
            rows += [f"  {line}" for line in lines[:3]]
        return "\n".join(f"  {row}" for row in rows)

    def require(self) -> None:
        """Refuse what cannot fit.

        Raises:
            DoesNotFit: with the largest lines and what makes them smaller.
        """
        if not self.within():
            raise DoesNotFit(f"this run needs more memory than is free:\n{self.table()}")


def _sum(lines: list[MemoryLine]) -> int:
    return sum(line.bytes for line in lines)


def _left_running(resumed: Path | None) -> bool:
    from tandem.engines.vllm.client.process import EngineRecord
    from tandem.processes import alive_after

    records = [EngineRecord.read(file) for file in resumed.glob("engine-*.json")] if resumed else []
    return any(record is not None and alive_after(record.pid, record.started) for record in records)


class MetaModel:
    """A recipe's model without memory, on torch's meta device as ``trainable`` prepares it: what it has and keeps."""

    def __init__(self, config: RunConfig, model_config: Any):
        """Build it.

        Raises:
            ConfigError: an option of ``trainable`` names what the model does not have.
        """
        from tandem.model import packing

        dtype, trainable = getattr(torch, config.dtype), config.trainable
        self.choice = packing.chosen(model_config, config.packing)
        model = packing.bare(model_config, dtype=dtype, packing=config.packing)
        with torch.device("meta"):
            self._model = model = trainable.prepare(model).eval()
        self._width = dtype.itemsize
        self.layers: int = model_config.get_text_config().num_hidden_layers
        self.adapted = trainable.described(model)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        head = causal.get_output_embeddings().weight
        self.parameters = sum(p.numel() for p in model.parameters())
        """Numbers in its weights, tied ones once."""
        self.trainable = sum(trained)
        """Those that are trained."""
        self.largest = max(trained)
        """Those of the largest trained tensor."""
        self.base = sum(p.numel() for p in trainable.base_names(model).values())
        """Those that an engine lends: all but an adapter's."""
        self.kept = trainable.kept_bytes(model)
        """Bytes of frozen weights kept beside those that are sampled from."""
        self.head = head.numel() if head.requires_grad else 0
        """Numbers in the head's weight if it is trained, else 0."""
        self.tied = head is causal.get_input_embeddings().weight
        """The head's weight is the embedding's."""

    @cached_property
    def token_bytes(self) -> int:
        """What an eager forward pass keeps of each token for its backward pass, with nothing recomputed.

        The model's own modules run once, in bfloat16: mixtures of experts do not run on the meta device in float32,
        in which what is not float32 already takes twice as much. Segments are short, since attention on that device
        keeps its scores.
        """
        from torch._subclasses import FakeTensorMode

        from tandem.model.attention import Packed, sequential_positions
        from tandem.model.packing import torch_alone
        from tandem.model.policy import Policy

        model = self._model.to(torch.bfloat16)
        policy = Policy(model, None, name="", compute=None)  # type: ignore[arg-type]
        plan = Packed(lengths=(16, 16, 16), parents=(None, 0, 0) if self.choice.packing == "tree" else (None,) * 3)
        weights: set[int] = set()
        saved: dict[int, tuple[Any, int]] = {}  # storages are held, so that no address is given twice

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                times = self._width // 2 if tensor.dtype == torch.bfloat16 else 1
                saved[storage._cdata] = storage, storage.nbytes() * times
            return tensor

        is_tree = self.choice.packing == "tree"
        # transformers' own masks ask a tensor for its values, unless it is a fake one.
        fake = contextlib.nullcontext() if is_tree else FakeTensorMode(allow_non_fake_inputs=True)
        with torch_alone(), fake, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if not is_tree:
                model.to_empty(device="cpu")
            weights |= {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
            tokens_1T = torch.zeros(1, sum(plan.lengths), dtype=torch.int64, device=policy.device)
            policy.hidden(tokens_1T, torch.as_tensor(sequential_positions(plan), device=policy.device)[None], plan)
        return sum(size for _, size in saved.values()) // sum(plan.lengths)


class Planner:
    """Plans the memory of a recipe on a machine.

    Args:
        config: the run.
        model_config: the model's transformers configuration; no weight is loaded.
        machine: where it has to fit; by default the accelerator, or else the host.
        beside: the host, where ``machine`` is an accelerator.
        prompt_tokens: tokens of the longest prompt.
        resumed: folder of a run that is gone on with; an engine that it left running has its memory already.
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: Any,
        machine: Machine | None = None,
        beside: Machine | None = None,
        *,
        prompt_tokens: int = TYPICAL_PROMPT,
        resumed: Path | None = None,
    ):
        self.modelled, self.model_config = MetaModel(config, model_config), model_config
        self.machine = machine or accelerator() or host()
        self.beside = None if self.machine.is_host else beside or host()
        self.prompt_tokens, self.resumed = prompt_tokens, resumed
        self.ranks = pairs.RankCounts.of(config)

    def plan(self, config: RunConfig) -> MemoryPlan:
        """Every line of a run."""
        lines = [*self._engine_lines(config), *self._weight_lines(config), *self._training_lines(config)]
        return MemoryPlan(
            lines=tuple(line for line in lines if line.bytes),
            overlap=config.max_lag > 0,
            machine=self.machine,
            beside=self.beside,
        )

    def _line(
        self, name: str, size: float, why: str, when: When = "always", *, beside: bool = False, each: bool = True
    ) -> MemoryLine:
        """A line; ``each``: every rank that shares this memory has it."""
        on_host = self.machine.is_host or beside
        times = self.ranks.local if each and on_host else 1
        why = f"{times} ranks × {why}" if times > 1 else why
        beside = beside and not self.machine.is_host
        return MemoryLine(name=name, bytes=int(size) * times, why=why, when=when, beside=beside)

    def engines(self, config: RunConfig) -> tuple[int, int]:
        """How many engines are started on this machine, and how many of them take memory where the weights are.

        Those that run already, at urls or left by the run in ``resumed``, have theirs.
        """
        from tandem.engines.vllm.spec import Vllm

        engine = config.engine
        if not isinstance(engine, Vllm) or engine.urls or _left_running(self.resumed):
            return 0, 0
        started = engine.replicas
        if self.ranks.world > 1 and pairs.has_slices(config):  # one for so many ranks
            started = max(1, self.ranks.local // engine.tensor_parallel_size)
        if self.machine.is_host:
            return started, started
        devices = engine.devices if self.ranks.world == 1 else pairs.devices_apart(config, self.ranks.local)
        if not devices or pairs.has_engines_beside(config):
            return started, engine.replicas
        ours = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
        return started, sum(ours in each.replace(" ", "").split(",") for each in devices)

    def share(self, config: RunConfig) -> float:
        """Share of the accelerator that an engine fills, weights and cache; 0 where these are counted apart."""
        engine: Any = config.engine
        return 0.0 if self.machine.is_host or engine.kv_cache_gb > 0 else float(engine.gpu_memory_utilization)

    def _engine_lines(self, config: RunConfig) -> list[MemoryLine]:
        """Processes, and the engines' weights and caches."""
        from tandem.engines.vllm.spec import CPU_CACHE_GB

        (started, near), is_host = self.engines(config), self.machine.is_host
        graders = config.grading.processes(config.groups_per_step * config.group_size) * max(1, len(config.sources))
        programs = LIBRARIES * self.ranks.local + graders * GRADER + started * ENGINE
        why = f"Python and its libraries, graders: {graders}, engines: {started}"
        lines = [self._line("programs", programs, why, beside=True, each=False)]
        if not is_host:
            lines.append(self._line("driver", (1 + near) * DRIVER, f"of an accelerator, in {1 + near} processes"))
        if ReportsChecksums not in config.engine.capabilities:
            return [*lines, self._cache_line(config)]
        if not near:
            return lines
        engine: Any = config.engine
        here = engine.tensor_parallel_size if is_host else 1  # of its workers
        share, cache = self.share(config), here * int((engine.kv_cache_gb or CPU_CACHE_GB) * 1e9)
        when: When = "sampling" if engine.sleep else "always"
        filled = share * self.machine.total or cache
        what = "of the accelerator for weights and cache" if share else "of keys and values"
        why = f"{near} × {readable(filled)} {what}"
        lines.append(self._line("engine", near * filled, why, when, each=not is_host))
        copy = near * here * self.modelled.base * _width(config) // engine.tensor_parallel_size
        if not share and not pairs.has_engines_beside(config):
            why = "its own weights, where new ones are sent"
            lines.append(self._line("engine's copy", copy, why, when, each=not is_host))
        if engine.sleep == 1:
            lines.append(self._line("engine asleep", copy, "its weights while it sleeps", beside=True, each=False))
        return lines

    def _weight_lines(self, config: RunConfig) -> list[MemoryLine]:
        """Weights, what is kept beside them, and the optimizer's states."""
        line, counts, width = self._line, self.modelled, _width(config)
        whole, base, trainable = counts.parameters * width, counts.base * width, counts.trainable
        cut, workers = self.ranks.world > 1 and config.distributed.shard == "weights", pairs.ranks_of_engine(config)
        parts, is_adapter = pairs.shards_of(config, self.ranks.world), config.trainable.folder_name != "model"
        shards, is_exported = 1 if is_adapter else parts, pairs.has_engines_beside(config)
        lines = []
        no_whole = self.ranks.world > 1 and pairs.is_cut(config)
        if no_whole and (is_adapter or not is_exported):
            if is_adapter:  # a trained model's parts are its masters
                why = f"1/{parts} of the frozen weights, and the adapter"
                lines.append(line("weights", base // parts + whole - base, why))
            why = "the model as it is loaded, before ranks take their parts"
            lines.append(line("loading", base, why, "starting", beside=True, each=False))
        elif not is_exported:
            lines.append(line("weights", whole, f"{counts.parameters:,} parameters × {width} bytes"))
        else:
            _, near = self.engines(config)
            ours = near * base // workers if not self.share(config) else 0  # else part of what the engines hold
            why = f"{'one copy' if near < 2 else f'{near} copies'} for trainer and engine, and the adapter"
            lines.append(line("weights", ours + whole - base, why))
            copies = base * (1 + (self.machine.is_host and near > 0))
            why = "the model as it is loaded, before the engine's takes its place"
            lines.append(line("loading", copies, why, "starting", beside=True, each=not cut))
        why = "the adapted layers' own weights, beside the merged ones"
        lines.append(line("frozen base", counts.kept // (parts if no_whole else 1), why))
        if config.reference is not None:
            why, copy = "a second copy of the weights that are trained", self._reference(config)
            if cut and config.trainable.payload == "weights":  # of trained ones a rank has float32 parts
                copy = (copy if is_adapter else trainable * max(4, width)) // parts
                why = f"1/{parts} of {why}"
            lines.append(line("reference", copy, why))
        if cut and width == 4:  # narrow ones have masters, which are among the states
            lines.append(line("shards", whole // shards, f"1/{shards} of the float32 weights"))
        states = config.optimizer.state_bytes(trainable, width)
        why = f"{trainable:,} trained parameters × {states / trainable:.0f} bytes"
        why, there = f"1/{shards} of {why}" if shards > 1 else why, config.optimizer.states_on == "host"
        lines.append(line("optimizer", states // shards, why, "running", beside=there))
        saving, is_host = config.checkpoint, self.machine.is_host
        if saving.save != "none" and (saving.asynchronous is True or (saving.asynchronous == "auto" and not is_host)):
            narrow = getattr(config.optimizer, "gradients", "float32") == "bfloat16"
            saved = self._saved_states(config) - (2 if narrow else 4) * trainable  # without gradients
            saved = saved * self.ranks.local // shards
            saved = trainable * width + (saved if saving.save == "all" else 0)
            why = "copies of what is saved, while it is written"
            size = saved if is_host else saved * PINNED
            lines.append(line("checkpoint", size, why, "running", beside=True, each=False))
        return lines

    def _training_lines(self, config: RunConfig) -> list[MemoryLine]:
        """One micro-batch of the longest answers, forward and backward, and gradients between ranks."""
        from tandem.distributed.gradient_sums import BUCKET, IN_FLIGHT
        from tandem.model.logprobs import TILE_CPU, TILE_GPU

        counts, width, is_host = self.modelled, _width(config), self.machine.is_host
        text, layers = self.model_config.get_text_config(), self.modelled.layers
        longest = -(-sum(self.longest(config)) // config.distributed.context_parallel)
        tokens = max(longest, min(config.micro_batch_tokens, self.step_tokens(config)))
        unsaved = tokens * self.modelled.token_bytes
        inputs = tokens * text.hidden_size * width * layers
        recomputed = {"selective": SELECTIVE * unsaved, "full": inputs}.get(config.checkpointing, unsaved)
        activations = int(min(unsaved, recomputed + unsaved / layers))  # a layer is there again in its backward pass
        tile = min(TILE_CPU if is_host else TILE_GPU, tokens * text.vocab_size)
        limited = config.sampling.penalised or config.sampling.top_p < 1 or config.sampling.top_k
        logit = (TRAINED_LOGIT if counts.head else FROZEN_LOGIT) * (2 if limited else 1)
        # A tied embedding ends with both of its gradients and their sum, when activations are gone.
        gradients = max(counts.largest * width, (3 * counts.head * width - activations) if counts.tied else 0)
        why = f"{tokens:,} tokens × {activations // tokens:,} bytes with checkpointing: {config.checkpointing}"
        sizes = {"activations": (activations, why)}
        sizes["logprobs"] = (tile * logit, f"a tile of {tile:,} logits × {logit} bytes")
        sizes["gradients"] = (gradients, "the largest that are on their way at once")
        if is_host:
            made = activations + tile * logit + gradients
            slack = int(SLACK * made + REMADE * (unsaved - activations))
            sizes["slack"] = (slack, "holes that the allocator cannot use at once")
        if self.ranks.world > 1:
            is_local, cut = config.distributed.gradients == "local", config.distributed.shard == "weights"
            sums = counts.trainable + IN_FLIGHT * counts.largest if is_local else 2 * IN_FLIGHT * BUCKET
            sizes["gradient sums"] = (4 * sums, "float32 gradients of a rank on their way to their owners")
            if cut:  # two layers at a time, unless a pass keeps what it gathered
                gathered = counts.base if is_local else 2 * counts.base // layers + counts.head
                sizes["gathered layers"] = (gathered * width, "weights that a pass gathers from other ranks")
        return [self._line(name, size, why, "training") for name, (size, why) in sizes.items()]

    def _cache_line(self, config: RunConfig) -> MemoryLine:
        """Keys, values and logits of the embedded engine."""
        text: Any = self.model_config.get_text_config()
        rows = config.groups_per_step * config.group_size * (config.max_lag + 1)
        rows = getattr(config.engine, "max_rows", None) or rows
        query_heads = getattr(text, "num_attention_heads", None) or 1
        heads = getattr(text, "num_key_value_heads", None) or query_heads
        head = vars(text).get("head_dim") or text.hidden_size // query_heads
        grown = sum(self.longest(config)) * 3 // 2  # it grows by halves
        token = 2 * text.num_hidden_layers * heads * head * _width(config)
        logits = text.vocab_size * 4 * (7 if config.sampling.penalised else 3)
        why = f"{rows} rows × ({grown:,} tokens × {token:,} bytes + {logits:,} of logits)"
        return self._line("KV cache", rows * (grown * token + logits), why, "sampling", each=False)

    def engine_weights(self, config: RunConfig) -> int:
        """Bytes of the weights that each accelerator of an engine holds."""
        return self.modelled.base * _width(config) // int(getattr(config.engine, "tensor_parallel_size", 1))

    def checkpoint_bytes(self, config: RunConfig) -> int:
        """Bytes of one checkpoint on disk, at most: what is trained and the optimizer's state."""
        counts, width = self.modelled, _width(config)
        reference = self._reference(config) if config.moves_reference else 0
        return counts.trainable * width + self._saved_states(config) + reference

    def _saved_states(self, config: RunConfig) -> int:
        """Bytes of the optimizer's states as checkpoints have them, and of gradients, which they have not."""
        cut = self.ranks.world > 1 and config.distributed.shard == "weights"
        more = config.optimizer.elementwise_bytes if cut and config.trainable.folder_name == "model" else 0
        trainable = self.modelled.trainable
        return config.optimizer.state_bytes(trainable, _width(config)) + more * trainable

    def _reference(self, config: RunConfig) -> int:
        counts = self.modelled
        return counts.kept or counts.trainable * _width(config)

    def longest(self, config: RunConfig) -> tuple[int, int]:
        """Tokens of the longest prompt, and of what may follow it."""
        # What environments of several turns call their limit.
        turns = max((getattr(source.env, "max_turns", 1) for source in config.sources.values()), default=1)
        room = max(1, context(config, self.model_config) - self.prompt_tokens)
        return self.prompt_tokens, min(room, turns * config.sampling.max_tokens)

    def step_tokens(self, config: RunConfig) -> int:
        """Tokens of a step whose answers are all of the longest; a rank's part of them where ranks share sequences."""
        prompt, answer = self.longest(config)
        whole = config.groups_per_step * (prompt + config.group_size * (answer - 1))
        return -(-whole // config.distributed.context_parallel)


def with_gradients(run: Planner, config: RunConfig) -> RunConfig:
    """The recipe with ``distributed.gradients`` chosen, as this run has it: another number of ranks may choose anew.

    Gradients are local where a step has several micro-batches for each rank and the plan has room for their sums.
    """
    divided = config.distributed
    if run.ranks.world == 1 or divided.gradients != "auto":
        return config
    local, scattered = (replace(config, distributed=replace(divided, gradients=way)) for way in ("local", "scattered"))
    at_once = run.ranks.world // divided.context_parallel * config.micro_batch_tokens
    has_rounds = run.step_tokens(config) > at_once
    return local if has_rounds and run.plan(local).within(1 / (1 + MARGIN)) else scattered


def context(config: RunConfig, model_config: Any) -> int:
    """Most tokens of a prompt and its answer together."""
    from tandem.model.policy import most_positions

    most = most_positions(model_config.get_text_config())
    return most if config.context is None else min(config.context, most)


def _width(config: RunConfig) -> int:
    """Bytes of one weight."""
    return 2 if config.dtype == "bfloat16" else 4


@contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """End an error that is for want of memory with what to change.

    Raises:
        DoesNotFit: the trainer is out of memory. Errors of other processes stay what they are.
    """
    try:
        yield
    except DoesNotFit:
        raise
    except Exception as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _PHRASES.search(str(error)):
            raise
        lower = f"lower micro_batch_tokens (now {config.micro_batch_tokens}), sampling.max_tokens or context"
        engine = "of an engine gpu_memory_utilization or max_rows"
        text = f"What to change: {lower}, {engine}, or set checkpointing: full or trainable: lora."
        if isinstance(error, TandemError):
            error.args = (f"{error}\n{text}",)
            raise
        raise DoesNotFit(f"out of memory: {message_of(error)}\n{text}") from error
