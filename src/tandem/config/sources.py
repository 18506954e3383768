"""Sources of tasks: an environment with its rewards, alone (``env``) or one of several (``envs``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from tandem.config import registry as resolve
from tandem.config import sections
from tandem.config.build import Builder, RewardSpec
from tandem.config.tree import Branch, Leaf, Problems, from_plain, within
from tandem.envs.base import Environment
from tandem.errors import bounded, check_bounds
from tandem.observability.watchdog import Timeouts
from tandem.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSource:
    """One of several environments: what is played, how it is scored, and how much of it."""

    env: Environment = field(metadata={"category": "envs"})
    """Where its tasks come from; left out, the kind of the entry's name."""
    rewards: Mapping[str, RewardSpec] = field(default_factory=dict, metadata={"category": "rewards", "weighted": True})
    """Reward functions by name: a weight, or a mapping of weight, kind and options; empty: the environment's own."""
    weight: float = bounded(1.0, above=0)
    """Share of the groups, against the other entries' weights."""
    min_share: float = bounded(0.0, most=1)
    """Least share of the groups, whatever the weights; rounded down in a single batch."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.rewards:
            object.__setattr__(self, "rewards", default_rewards(self.env))


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Which tasks are played and how: what ``tandem train`` and ``tandem work`` have in common."""

    model: str
    """Hugging Face id or a local folder."""
    env: Environment | None = field(default=None, metadata={"category": "envs", "unless": ("envs",)})
    """Where tasks come from."""
    envs: Mapping[str, EnvSource] = field(default_factory=dict, metadata={"entries": EnvSource})
    """Several environments instead, by name: a weight, or a mapping of env, rewards, weight and min_share."""
    rewards: Mapping[str, RewardSpec] = field(default_factory=dict, metadata={"category": "rewards", "weighted": True})
    """Reward functions by name: a weight, or a mapping of weight, kind and options; empty: the environment's own."""
    group_size: int = bounded(8, least=2)
    """Answers sampled per task."""
    sampling: Sampling = field(default_factory=Sampling)
    """How answers to train on are sampled."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """Answers cut by a length limit: train on them as they are, leave their tokens out, or lower their reward."""
    truncated_penalty: float = bounded(1.0)
    """What truncated: penalise subtracts from the reward."""
    zero_variance_groups: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal: sample another, or train on them (their advantage is 0)."""
    context: int | None = bounded(None, least=2)
    """Most tokens of a prompt and its answer together; null: the model's own limit."""
    chat_template: str | None = None
    """Jinja chat template, as text or the path of a file; null: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, such as {enable_thinking: false}."""
    seed: int = 0
    """Fixes task order and, of a run, sampling and initialisation."""
    grading: sections.GradingOptions = field(default_factory=sections.GradingOptions)
    """Processes that compute rewards."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long it may stand still."""

    def __post_init__(self) -> None:
        if not self.rewards and self.env is not None:
            object.__setattr__(self, "rewards", default_rewards(self.env))

    def checks(self) -> dict[str, tuple[bool, str]]:
        """Checks of these options, for ``require``."""
        return {
            "model": (bool(self.model.strip()), "a Hugging Face id or a folder"),
            "envs": ((wrong := fault(self.env, self.envs)) is None, wrong or ""),
            "rewards": (not (self.envs and self.rewards), "given in each entry of envs, which has rewards of its own"),
            **sections.sampling_checks(self.sampling),
        }


def exactly(number: float) -> Fraction:
    """The number as a person writes it: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


def fault(env: Environment | None, envs: Mapping[str, EnvSource]) -> str | None:
    """What ``envs`` must be and is not, as ``require`` words it; None where it is right."""
    if envs and env is not None:
        return "left out where env is given: a run has one environment (env) or several (envs)"
    if odd := [name for name in envs if not re.fullmatch(r"[\w-]+", name)]:
        return f"named by words of letters, digits, - and _, which {odd[0]!r} is not"
    least = sum(exactly(source.min_share) for source in envs.values())
    if least > 1:
        return f"given a min_share of 1 at most together, and they add up to {float(least):g}"
    if least == 1 and (without := [name for name, source in envs.items() if not source.min_share]):
        return f"given a min_share below 1 together: nothing is left for {without[0]}"
    return None


def default_rewards(env: Environment) -> Mapping[str, RewardSpec]:
    """Reward specs of an environment's own choice.

    Raises:
        ValueError: it has none.
    """
    problems = Problems()
    where = f"the default rewards of {env.name}"
    specs = Builder(problems).rewards("rewards", from_plain(dict(env.default_rewards), where), "rewards")
    problems.raise_if_any(where)
    if not specs:
        known = ", ".join(resolve.names("rewards"))
        raise ValueError(f"rewards must name at least one, since {env.name} has none of its own; known: {known}")
    return dict(specs)


def spell_out(tree: Branch) -> None:
    """Entries of ``envs`` in full: a number is a weight, and the name is the environment unless it is given."""
    entries = tree.entries.get("envs")
    if not isinstance(entries, Branch):
        return
    for name, entry in list(entries.entries.items()):
        where = entries.key_where[name]
        if isinstance(entry, Leaf) and type(entry.value) in (int, float):
            entry = within("weight", entry)
            entries.put(name, entry, where)
        if isinstance(entry, Branch) and "env" not in entry.entries:
            entry.put("env", Leaf(value=name, text=name, where=where), where)


def write_out_rewards(tree: Branch, path: Sequence[str], where: str) -> None:
    """Write out the environment's own rewards, of which ``path`` names one, unless the recipe gives any."""
    entries = tree.entries.get("envs")
    owner = entries.entries.get(path[1]) if isinstance(entries, Branch) and path[0] == "envs" else tree
    if not isinstance(owner, Branch) or "rewards" in owner.entries or "env" not in owner.entries:
        return
    env = Builder(Problems()).part("envs", owner.entries["env"], "env", None)
    if isinstance(env, Environment):  # else the mistake in it is found when the whole recipe is built
        owner.put("rewards", from_plain(dict(env.default_rewards), f"the default rewards of {env.name}"), where)
