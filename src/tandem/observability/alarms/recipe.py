"""What alarms read of a recipe: which reward is the goal, and the options that they advise to change."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.types import Json


class Recipe:
    """A resolved recipe as plain data."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """Nothing is checked: the recipe was read already.

        Args:
            config: the recipe with every option, as a run's sinks get it.
        """
        self._config = config
        sources = config.get("envs") or {}
        rewards = [source.get("rewards") or {} for source in sources.values()] or [config.get("rewards") or {}]
        weights = [{name: _weight(spec) for name, spec in each.items()} for each in rewards]
        goals = {max(each, key=lambda name: abs(each[name])) for each in weights if each}
        self.bonuses: Mapping[str, float] = {
            name: weight for each in weights for name, weight in each.items() if name not in goals and weight
        }
        """Weight of each reward that is the largest of no environment."""
        self.shares: Mapping[str, float] = _shares(sources)
        """Share of the groups that each of several environments is to give."""
        self.elsewhere = bool(config.get("broker"))
        """True if a broker brings the groups."""
        if not any(weights):
            self.goal = "reward"
        elif len(weights) == 1:
            self.goal = f"reward/{next(iter(goals))}"
        else:
            self.goal = "accuracy"
        self.off_policy = bool(config.get("max_lag")) or self.elsewhere or bool(self.get("replay.size"))
        """True if what is trained on may be older than the policy."""

    def get(self, path: str) -> Json:
        """An option by its dotted path; None if there is none."""
        value: Json = self._config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def less(self, path: str, by: float = 4.0) -> str:
        """``optimizer.lr=5e-06 (now 2e-05)``: an option at a part of what it is."""
        value = self.get(path)
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        return f"{path}={value / by:.2g} (now {value:.3g})" if known else f"a smaller {path}"

    def warmer(self) -> str:
        """Advice to sample at temperature 1, where it is lower."""
        now = self.get("sampling.temperature")
        return f"sampling.temperature=1 (now {now:g}); " if isinstance(now, (int, float)) and now < 1 else ""

    def more(self, path: str, by: int = 2) -> str:
        """``sampling.max_tokens=400 (now 200)``: a whole number at a multiple of what it is."""
        value = self.get(path)
        known = isinstance(value, int) and not isinstance(value, bool)
        return f"{path}={value * by} (now {value})" if known else f"a larger {path}"


def _weight(spec: Json) -> float:
    return float(spec.get("weight", 1.0)) if isinstance(spec, Mapping) else float(spec)


def _shares(sources: Mapping[str, Json]) -> dict[str, float]:
    """Shares by weight, at least as large as asked for."""
    total = sum(float(source.get("weight", 1.0)) for source in sources.values())
    return {
        name: max(float(source.get("weight", 1.0)) / total, float(source.get("min_share") or 0.0))
        for name, source in sources.items()
        if total > 0
    }
