"""Sources of tasks: an environment with its rewards, alone (``env``) or one of several (``envs``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tandem.config import registry as resolve
from tandem.config.build import Builder, RewardSpec
from tandem.config.tree import Branch, Leaf, Problems, from_plain, within
from tandem.envs.base import Environment
from tandem.errors import bounded, check_bounds


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
