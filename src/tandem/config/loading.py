"""A recipe: YAML and dotted overrides in, a ``RunConfig`` of live parts out, and back."""

# ruff: noqa: RUF009 - part() and parts() are calls to dataclasses.field
from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem import clone, machine
from tandem.algorithms.curricula.base import Curriculum
from tandem.config import override, sections
from tandem.config import registry as resolve
from tandem.config.build import Builder, encode, part, parts
from tandem.config.dialects import translate
from tandem.config.sources import EnvSource, PlayOptions
from tandem.config.tree import Branch, Items, Leaf, Problems, from_plain, parse, plain, render
from tandem.envs.base import Environment
from tandem.errors import ConfigError, bounded, check_bounds, require
from tandem.observability.answers import PrintCompletions
from tandem.observability.loggers.base import MetricsLogger
from tandem.types import Json, Sampling

if TYPE_CHECKING:
    from tandem.algorithms.advantages.base import Advantage
    from tandem.algorithms.corrections.base import Correction
    from tandem.algorithms.losses.base import Loss
    from tandem.algorithms.references.base import Reference
    from tandem.engines.base import EngineSpec
    from tandem.optimizers.base import Optimizer
    from tandem.trainable.base import Trainable
    from tandem.weight_sync.base import WeightSync
else:  # their bases import torch; a field made by ``part`` is built by its category, not by its annotation
    Advantage = Correction = EngineSpec = Loss = Optimizer = Reference = WeightSync = Trainable = Any


@dataclass(frozen=True, kw_only=True)
class RunConfig(PlayOptions):
    """Everything about a run. Part fields hold live parts, not names."""

    steps: int = bounded(least=1)
    """Optimizer steps of the whole run."""
    env: Environment | None = field(
        default=None, metadata={"category": "envs", "unless": ("envs", "broker", "warm_start")}
    )
    """Where tasks come from; with broker those to evaluate on, if any."""
    broker: sections.BrokerOptions | None = field(default=None, metadata={"shorthand": "url"})
    """Train on what environments elsewhere send to this broker: its address, or a mapping."""
    groups_per_step: int = bounded(8, least=1)
    """Groups (tasks) trained on in one step."""
    max_lag: int = 0
    """Most steps by which the weights that sampled a token may be older than those it trains; 0 is on-policy."""
    oversample: float | Literal["auto", "keep", "off"] = "auto"
    """Groups sampled at once for a batch, where those without signal are dropped: auto as many as will fill it by the
    share that had signal so far, keep the same but trains what is over too, off one for each place; or a factor."""
    on_policy_tail: Literal["wait", "abort"] = "wait"
    """On-policy, answers that are not needed any more when the batch is full: wait for them, or abort them; their tasks
    are played again."""
    max_resample_times: int | None = bounded(None)
    """How often a batch's worth of zero-variance groups is sampled anew; then the step takes what there is. null: until
    the batch is full."""
    replay: sections.Replay = field(default_factory=sections.Replay)
    """Groups with signal that take the place of zero-variance ones, before others are sampled."""
    reroll: sections.Reroll = field(default_factory=sections.Reroll)
    """Unsolved tasks, drawn again later."""
    curriculum: Curriculum | None = field(default=None, metadata={"category": "curricula"})
    """How often each task is drawn, by what came of it so far; null: once in every epoch."""
    warm_start: sections.WarmStart | None = field(default=None, metadata={"shorthand": "steps"})
    """Train on given replies first; null: never."""
    teacher: sections.Teacher | None = field(default=None, metadata={"shorthand": "model"})
    """Train towards this model's distribution in place of rewards (on-policy distillation); null: none."""
    advantage: Advantage = part("advantages", "dr_grpo")
    """How much better an answer was than its group."""
    loss: Loss = part("losses", "grpo")
    """The objective, per token."""
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    """What ratios are against: the sampler's logprobs, or the policy's own as the step began (decoupled)."""
    corrections: tuple[Correction, ...] = parts("corrections", ())
    """Weights of tokens by how far their sampler was from the policy; several are multiplied."""
    reference: Reference | None = field(default=None, metadata={"category": "references"})
    """An older policy whose KL is penalised; null: none."""
    updates_per_batch: int = bounded(1, least=1)
    """Optimizer updates on each batch, all within one step; above 1 the policy leaves what sampled the batch."""
    optimizer: Optimizer = part("optimizers", "adamw")
    """How weights are updated, and the learning rate."""
    trainable: Trainable = part("trainable", "full")
    """What is trained: every weight, or an adapter."""
    engine: EngineSpec = part("engines", "embedded")
    """What samples the answers."""
    sync: WeightSync = part("sync", "shared")
    """How new weights reach the engine."""
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    """Type of the weights; optimizers keep float32 masters where it is narrower. auto: float32 on a processor without
    instructions for bfloat16, else bfloat16; the run's own recipe has what it was."""
    micro_batch_tokens: int = bounded(1024, least=1)
    """Most tokens that a rank computes in one forward and backward; lowers memory, changes no result."""
    packing: Literal["auto", "tree", "plain"] = "auto"
    """How what sequences share is computed: once (tree), or with each (plain); auto: tree, or else once where sequences
    begin with it, where a small random copy of the model computes the same as of one sequence at a time."""
    router_replay: bool = False
    """Of a mixture of experts: train each token on the experts that the engine routed it to, not on those that the
    trainer's rounding would choose; lowers the mismatch of logprobs."""
    router_aux_loss_coef: float = bounded(0.0, least=0)
    """Of a mixture of experts: this times the model's own load-balancing loss is added, of each micro-batch by its
    share of the step's tokens."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model's layers for the training pass: auto where they run on CUDA and the machine has a compiler."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of being kept: selective all but products and attention, full
    each layer; lowers memory, changes no result."""
    matmul: Literal["dtype", "fp8"] = "dtype"
    """Products of the layers' linear weights: in the type of the weights, or in 8 bits (a GPU of compute capability 8.9
    or above, and torchao)."""
    evaluate: sections.Evaluate = field(default_factory=sections.Evaluate)
    """Measuring on held-out tasks."""
    checkpoint: sections.Checkpoint = field(default_factory=sections.Checkpoint, metadata={"shorthand": "save"})
    """When the run is saved."""
    alarms: sections.Alarms = field(default_factory=sections.Alarms, metadata={"shorthand": "action"})
    """What becomes of a run that goes wrong while nothing is broken: warn or stop, or a mapping."""
    print_completions: PrintCompletions = field(default_factory=PrintCompletions, metadata={"shorthand": "every"})
    """How often sampled answers are shown with their rewards: every so many steps, or a mapping of every and count."""
    loggers: tuple[MetricsLogger, ...] = parts("loggers", ("console",))
    """Where metrics go besides metrics.jsonl, which is always written."""
    metric_names: Literal["tandem", "trl"] = "tandem"
    """trl: loggers get a step's numbers by TRL's names, too, such as completions/mean_length."""
    runs: str = "runs"
    """Folder that holds the run's folder."""
    name: str | None = None
    """The run's folder name; null: <env>-<model>-<UTC time>."""
    threads: int = bounded(0)
    """CPU threads of torch; 0 uses every core."""
    ranks: int | Literal["auto"] | None = None
    """Processes that compute a step side by side, a GPU each: so many, which the trainer starts itself; auto for one on
    each GPU of this host; null for as many as a launcher (torchrun, srun) has started, or else one."""
    gpus: int | None = None
    """GPUs of this host that the memory plan and sync divide between ranks and engines, in place of ranks,
    engine.replicas and engine.devices; null: these say it."""
    distributed: sections.Distributed = field(default_factory=sections.Distributed)
    """How a step is divided among several ranks."""

    def __post_init__(self) -> None:
        if self.dtype == "auto":  # here and nowhere else: all that reads a configuration finds a type
            object.__setattr__(self, "dtype", "bfloat16" if machine.computes_bfloat16() else "float32")
        check_bounds(self)
        require(
            env=(
                bool(self.env or self.envs or self.broker or self.needs_no_env),
                "given, such as gsm8k, or envs, or broker",
            ),
            warm_start=(
                self.warm_start is None or self.demonstrates or self.broker is None,
                "given data, since a broker's tasks have no gold replies",
            ),
            teacher=((wrong := teacher_fault(self)) is None, wrong or ""),
            max_lag=(
                self.max_lag >= (self.broker is not None),
                "at least 1 with broker" if self.broker else "at least 0",
            ),
            old_logprobs=(
                self.old_logprobs == "recomputed"
                or not any(getattr(part, "needs_recomputed", False) for part in self.corrections),
                "recomputed with beyond: truncate, since sampled has the ratio in the loss; or use beyond: mask",
            ),
            oversample=(isinstance(self.oversample, str) or 1 <= self.oversample < math.inf, "at least 1, or a word"),
            replay=((wrong := replay_fault(self)) is None, wrong or ""),
            matmul=(
                self.matmul == "dtype" or (self.dtype == "bfloat16" and self.compile is not False),
                "dtype with float32 weights or compile: false: casts that are not fused cost more than 8 bits save",
            ),
            seed=(0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            ranks=(not isinstance(self.ranks, int) or self.ranks >= 1, "at least 1, auto or null"),
            gpus=(
                self.gpus is None or (self.gpus >= 1 and not self._counts_gpus),
                "at least 1, without ranks, engine.replicas and engine.devices, which it decides",
            ),
            name=(self.name is None or _is_folder_name(self.name), "a folder's name, not a path"),
            runs=(bool(self.runs.strip()), "a folder"),
            **{
                "reference.every": (
                    getattr(self.reference, "every", 0) < self.steps,
                    f"below steps ({self.steps}): the average would never move",
                ),
            },
            **self.checks(),
        )
        super().__post_init__()

    @property
    def _counts_gpus(self) -> bool:
        """True if some option says which GPUs train or sample."""
        engine: Any = self.engine
        return self.ranks is not None or getattr(engine, "replicas", 1) > 1 or bool(getattr(engine, "devices", ()))

    @property
    def sources(self) -> Mapping[str, EnvSource]:
        """Every environment with its rewards, by the name that its groups and metrics bear; one is a mixture of one."""
        return self.envs if self.env is None else {self.env.name: EnvSource(env=self.env, rewards=self.rewards)}

    @property
    def warm_steps(self) -> int:
        """Steps of the warm start: the first of the run. Its epochs are counted when the run begins."""
        if self.warm_start is None or self.warm_start.epochs is not None:
            return 0
        return self.steps if self.warm_start.steps is None else min(self.warm_start.steps, self.steps)

    @property
    def supervised(self) -> bool:
        """True if every step trains on given replies: nothing is sampled but to evaluate."""
        return self.warm_steps == self.steps

    @property
    def demonstrates(self) -> bool:
        """True if the replies of the warm start are rows of data."""
        return self.warm_start is not None and bool(self.warm_start.data)

    @property
    def needs_no_env(self) -> bool:
        """True if rows of data are all that is trained on, or may turn out to be once epochs are counted."""
        return self.demonstrates and (self.supervised or (self.warm_start is not None and bool(self.warm_start.epochs)))

    @property
    def moves_reference(self) -> bool:
        """True if checkpoints hold the reference: it follows the policy, or is what a warm start has made."""
        return self.reference is not None and (self.reference.saved or self.warm_steps > 0)

    @property
    def plays(self) -> bool:
        """True if tasks are played in the trainer's process, to train on or to evaluate."""
        return self.broker is None or self.evaluates

    @property
    def evaluates(self) -> bool:
        """True if held-out tasks are looked at in this run."""
        options = self.evaluate
        return bool(self.sources) and options.tasks > 0 and bool(options.before or options.after or options.every)

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing, given the others."""
        broker, divides = self.broker is not None, self.distributed != sections.Distributed()
        keeps, evaluates = self.zero_variance_groups == "keep", self.evaluates or not self.sources
        others = getattr(self.engine, "urls", ())  # whose requests are in flight at any time
        finishes = self.max_lag == 0 and getattr(self.sync, "in_flight", "") == "finish" and not others
        drawn = ("oversample", "on_policy_tail", "max_resample_times", "replay", "reroll", "curriculum")
        # Which tokens end an answer is read by the trainer where they may not come too early.
        stops = ("sampling.stop", *(() if self.sampling.min_tokens else ("sampling.stop_token_ids",)))
        played = ("rewards", "grading", *stops)
        rows: tuple[tuple[bool, tuple[str, ...], str], ...] = (
            (bool(self.envs), ("env", "rewards"), "envs names several environments, each with its rewards"),
            (not self.envs, ("envs",), "it names none"),
            (self.dtype == "float32", ("optimizer.gradients",), "dtype: float32 gives float32 gradients"),
            # null is as many as a launcher starts; defaults are let be: a run of several ranks may go on as one
            (self.ranks == 1 and divides, ("distributed",), "the trainer is one process"),
            (self.truncated != "penalise", ("truncated_penalty",), "it is read by truncated: penalise alone"),
            (finishes, ("sync.in_flight",), "with max_lag: 0 no request is in flight when weights change"),
            (self.max_lag != 0, ("on_policy_tail",), "with max_lag above 0 answers go on while a step is trained"),
            (keeps, ("oversample", "max_resample_times"), "zero_variance_groups: keep samples nothing anew"),
            (broker, drawn, "tasks are drawn elsewhere (broker)"),
            (
                self.teacher is not None,
                ("advantage", "zero_variance_groups", *drawn),
                "the teacher judges every token, whatever its group earned",
            ),
            (broker, ("truncated",), "answers are cut and judged elsewhere (broker); give it to tandem work"),
            (broker and not self.sources, ("evaluate", *played), "tasks are elsewhere (broker) and there is no env"),
            (
                broker and not evaluates,
                ("env", "envs", *played),
                "tasks are elsewhere (broker) and nothing is evaluated",
            ),
        )
        return inert_objective(self) | {name: why for applies, names, why in rows if applies for name in names}


def inert_objective(config: RunConfig) -> dict[str, str]:
    """Options by dotted path, and why each changes nothing.

    A loss names its own by class variables: ``at_ratio_one``, those that nothing reaches while every ratio is 1;
    ``compares`` is false if it has no ratio.
    """
    unread: dict[str, str] = {}
    recomputed, loss = config.old_logprobs == "recomputed", config.loss
    if recomputed and config.updates_per_batch == 1:
        why = "old_logprobs: recomputed with updates_per_batch: 1 makes every ratio 1"
        unread |= {f"loss.{name}": why for name in getattr(loss, "at_ratio_one", ())}
    compares = getattr(loss, "compares", True) or getattr(loss_reference(config), "ratio_corrected", False)
    if not compares and not config.corrections:
        unread["old_logprobs"] = "this loss has no ratio, and there are no corrections"
    return unread


def loss_reference(config: RunConfig) -> Reference | None:
    """The reference whose penalty is a term of the loss; None where there is none, or the reward has it."""
    return None if config.reference is None or config.reference.in_reward else config.reference


def only_by_advantage(config: RunConfig) -> bool:
    """True if a sample whose advantages are all 0 has no gradient: the loss declares it, and no term is added to it."""
    return config.reference is None and getattr(config.loss, "by_advantage", False)


def replay_fault(config: RunConfig) -> str | None:
    """What replay must have and lacks, where the objective would take replayed tokens for on-policy ones; else None."""
    ratios = config.old_logprobs == "sampled" and getattr(config.loss, "compares", True)
    if not config.replay.size or ratios or any(getattr(part, "weighs", True) for part in config.corrections):
        return None
    return "given with corrections that weigh tokens, or with old_logprobs: sampled and a loss that has a ratio"


def teacher_fault(config: RunConfig) -> str | None:
    """What a teacher must have and lacks, where its logprobs could not be compared with the sampler's; else None."""
    sampling = config.sampling
    if config.teacher is None:
        return None
    if config.broker is not None:
        return "left out with broker: environments elsewhere sample and judge"
    plain = Sampling(max_tokens=sampling.max_tokens, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    if sampling != plain:
        return "left out, or sampling at temperature 1 without cut-offs, penalties and regex: it scores all tokens so"
    return None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A recipe that was read."""

    config: RunConfig
    """The run it describes."""
    written: Json
    """What was set, overrides included, as plain data."""
    notes: tuple[str, ...] = ()
    """How it differs from what the file says, where that is another system's."""


def load(source: Path, overrides: Sequence[str] = (), *, serving: bool = False) -> Loaded:
    """Read a recipe, or another system's file that can be read as one.

    Args:
        source: the file.
        overrides: laid over the recipe.
        serving: read it to start its engine alone.

    Raises:
        ConfigError: with every mistake in it, each with file, line and a hint.
        RewardError: if all that is wrong is a reward that cannot be imported.
    """
    problems = Problems()
    shipped = None if source.exists() else clone.recipes().get(str(source))
    source = shipped or source
    tree = parsed(source, problems, clone.written(shipped) if shipped else None)
    recipe, notes = translate(tree, serving, problems)
    if recipe is not tree:
        problems.raise_if_any(str(source))  # what follows from a mistake in another system's file is not told
    return _build(recipe, source, overrides, problems, tuple(notes))


def parsed(source: Path, problems: Problems, text: str | None = None) -> Branch:
    """A recipe's tree, of its file or of the text that stands for it; raises ConfigError where there is none.

    That of a run's folder is its config.yaml.
    """
    source = source / "config.yaml" if source.is_dir() else source
    tree = parse(_read(source) if text is None else text, str(source), problems)
    resolve.search(source.parent)  # modules with its own rewards and parts may lie beside a recipe
    if isinstance(tree, Leaf | Items):
        problems.add(tree.where, "a recipe is a mapping of options, such as 'model: ...' on a line of its own")
    if not isinstance(tree, Branch):
        problems.raise_if_any(str(source))
        tree = Branch(where="")
    tree.where = str(source)
    return tree


def from_options(options: Mapping[str, Json], overrides: Sequence[str], source: Path) -> Loaded:
    """A run described without a recipe's file: ``options`` as a recipe would hold them, said to be from ``source``.

    Raises:
        ConfigError, RewardError: as ``load``.
    """
    tree = from_plain(dict(options), str(source))
    assert isinstance(tree, Branch)
    return _build(tree, source, overrides, Problems())


def _build(
    tree: Branch, source: Path, overrides: Sequence[str], problems: Problems, notes: tuple[str, ...] = ()
) -> Loaded:
    """Overrides laid over a tree, and the whole of it built."""
    override.apply(tree, RunConfig, overrides, problems)
    config = Builder(problems).dataclass(RunConfig, tree, "")
    problems.raise_if_any(str(source))
    assert isinstance(config, RunConfig)
    options = plain(tree)
    if options.get("dtype") == "auto" and config.dtype == "float32":
        notes = (*notes, "dtype: auto is float32 here, for this processor has no instructions for bfloat16")
    if config.matmul == "fp8":
        notes = (*notes, FP8)
    return Loaded(config=config, written=options, notes=notes)


def _read(source: Path) -> str:
    """Text of a recipe."""
    try:
        return source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {source}{_nearby(source)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {source}: {error}") from error


def _nearby(source: Path) -> str:
    """Recipes, and runs, that may have been meant."""
    if "=" in str(source):
        return f": it is an option, which comes after a recipe, as in: tandem train quickstart {source}"
    named = {name: name for name in clone.recipes()}
    for folder in (Path(), Path("recipes"), source.parent):
        named |= {path.stem: str(path) for path in sorted(folder.glob("*.y*ml"))}
    named |= {run.parent.name: str(run.parent) for run in source.parent.glob("*/config.yaml")}
    close = difflib.get_close_matches(source.stem, list(named), n=1, cutoff=0.5)
    return f"; did you mean {named[close[0]]}?" if close else "; tandem recipes lists those that ship"


def dump(config: RunConfig) -> str:
    """Complete YAML that loads to an equal config; options that are inert are left out."""
    return render(encode(config, complete=False))


def as_json(config: RunConfig) -> dict[str, Json]:
    """The whole recipe as plain data, inert options included."""
    return encode(config)


FP8 = "matmul: fp8 saves time and no memory: weights stay bfloat16, and each product rounds a copy of its own"
"""What is said wherever it is chosen."""
RESUMABLE = frozenset({
    "steps", "evaluate", "checkpoint", "checkpointing", "loggers", "threads", "grading", "broker", "timeouts", "alarms",
    "print_completions", "metric_names", "ranks", "gpus", "distributed", "micro_batch_tokens",
})  # fmt: skip
"""Options that a resumed run may change: they do not decide what a training step computes."""
ENGINE_KEEPS = frozenset({"kind", "seeded", "max_model_len", "args"})
"""Options of the engine that a resumed run keeps; where engines run, how many and how large is free."""


def digest(config: RunConfig) -> str:
    """Hex digest of everything that decides what a training step computes."""
    trained = {key: value for key, value in as_json(config).items() if key not in RESUMABLE | {"runs", "name"}}
    # How weights travel is free; how far the engine's may be behind is not.
    trained["sync"] = {"every": config.sync.behind + 1}
    if isinstance(engine := trained["engine"], dict):
        trained["engine"] = {key: value for key, value in engine.items() if key in ENGINE_KEEPS}
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()


def _is_folder_name(name: str) -> bool:
    return bool(name.strip()) and name not in (".", "..") and not set(name) & set("/\\\0")
