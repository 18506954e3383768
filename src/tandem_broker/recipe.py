"""Recipe of ``tandem work``: the environments' part, and the addresses of broker and engines.

A recipe for training is taken as it is: what concerns the trainer alone is left to the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from tandem.config import override
from tandem.config.build import Builder
from tandem.config.loading import RunConfig, parsed
from tandem.config.sections import BrokerAt
from tandem.config.sources import EnvSource, PlayOptions
from tandem.config.tree import Branch, Leaf, Problems, from_plain
from tandem.errors import bounded, check_bounds, require
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesAt:
    """The engines that answers are sampled from; requests go to the one with the fewest under way."""

    urls: str | tuple[str, ...]
    """Their addresses, or the one: of Tandem's engines, of servers with Atropos' /generate, or of stock vLLM."""
    model: str | None = None
    """What they call the model; null: as it is called here."""
    api_key_variable: str = ""
    """Environment variable with their API key; empty: none is sent."""
    request_seconds: float = 3600.0
    """How long one answer may take."""

    def __post_init__(self) -> None:
        if isinstance(self.urls, str):
            object.__setattr__(self, "urls", (self.urls,))
        http = all(url.startswith(("http://", "https://")) for url in self.urls)
        require(
            urls=(bool(self.urls) and http, "addresses that begin with http:// or https://"),
            request_seconds=(self.request_seconds > 0, "above 0 (seconds)"),
        )


@dataclass(frozen=True, kw_only=True)
class Work(PlayOptions):
    """Environments that play for a broker."""

    broker: BrokerAt = field(metadata={"shorthand": "url"})
    """Where groups go: an address, or a mapping."""
    engine: EnginesAt = field(metadata={"shorthand": "urls"})
    """Where answers are sampled: an address, a list of them, or a mapping."""
    n: int = bounded(16, least=1)
    """Groups played at once, at most."""
    ahead: float = bounded(3.0, least=1)
    """Batches that may be queued or under way before this environment pauses."""
    total_steps: int | None = bounded(None)
    """Steps of the trainer after which to end; null: as many as it says it will take; 0: never."""
    known_as: str | None = None
    """Name at the broker; null: the environment's."""
    weight: float = bounded(1.0, above=0)
    """Share of the generation against other environments'."""
    min_share: float | None = bounded(None, most=1)
    """Least share of every batch, 0 to 1; null: none."""
    group_seconds: float = 1800.0
    """How long one group may take; then it is dropped."""
    give_up_seconds: float = bounded(1800.0, above=0)
    """How long the broker or all engines may be away; then the work ends with an error."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            env=(bool(self.env or self.envs), "given, such as gsm8k (tandem list envs), or envs"),
            group_seconds=(self.group_seconds > 0, "above 0 (seconds)"),  # inf: no limit
            **self.checks(),
        )
        super().__post_init__()

    @property
    def sources(self) -> Mapping[str, EnvSource]:
        """What is played, by its name at the broker."""
        if self.env is not None:
            name, share = self.known_as or self.env.name, self.min_share or 0.0
            return {name: EnvSource(env=self.env, rewards=self.rewards, weight=self.weight, min_share=share)}
        return self.envs

    def inert(self) -> Mapping[str, str]:
        """What each entry of several environments has of its own, and what the others make useless."""
        names = ("env", "rewards", "known_as", "weight", "min_share")
        unread = dict.fromkeys(names, "each entry of envs has its own") if self.envs else {}
        if self.truncated != "penalise":
            unread["truncated_penalty"] = "it is read by truncated: penalise alone"
        return unread


def load(recipe: Path | None, overrides: Sequence[str]) -> Work:
    """Read a recipe, or options alone.

    Raises:
        ConfigError: with every mistake in them.
    """
    problems, source = Problems(), str(recipe or "tandem work")
    tree = Branch(where=source) if recipe is None else parsed(recipe, problems)
    problems.raise_if_any(source)
    return _built(_of_the_environment(tree), overrides, source, problems)


def from_options(options: Mapping[str, Json], overrides: Sequence[str], source: str) -> Work:
    """As ``load``, of options that were made elsewhere, said to be from ``source``."""
    tree = from_plain(dict(options), source)
    assert isinstance(tree, Branch)
    return _built(tree, overrides, source, Problems())


def _built(tree: Branch, overrides: Sequence[str], source: str, problems: Problems) -> Work:
    override.apply(tree, Work, overrides, problems)
    trainers = _trainers()
    for name in [name for name in tree.entries if name in trainers]:
        problems.add(tree.key_where[name], f"{name!r} is an option of the trainer alone (tandem train); leave it out")
        del tree.entries[name]
    built = Builder(problems).dataclass(Work, tree, "")
    problems.raise_if_any(source)
    assert isinstance(built, Work)
    return built


def _trainers() -> set[str]:
    """Options that concern the trainer alone."""
    return {f.name for f in fields(RunConfig)} - {f.name for f in fields(Work)}


def _of_the_environment(tree: Branch) -> Branch:
    """A recipe without what concerns the trainer alone; unknown options stay, and are reported."""
    trainers, kept = _trainers(), Branch(where=tree.where)
    for name, value in tree.entries.items():
        kept_value = value
        if name in ("broker", "engine") and isinstance(value, Branch):
            own = {f.name for f in fields(BrokerAt if name == "broker" else EnginesAt)}
            kept_value = Branch(where=value.where)
            for key in own & set(value.entries):
                kept_value.put(key, value.entries[key], value.key_where[key])
        empty = isinstance(kept_value, Branch) and not kept_value.entries
        # The trainer's engine by its kind alone says nothing of where one runs.
        kind = name == "engine" and isinstance(kept_value, Leaf) and "://" not in kept_value.text
        if name not in trainers and not empty and not kind:
            kept.put(name, kept_value, tree.key_where[name])
    return kept
