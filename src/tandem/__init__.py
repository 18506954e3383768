"""Tandem: GRPO post-training in which trainer and inference engine ride one copy of the weights.

The names below are what a script or a notebook needs. Each is imported when it is first used, so ``import tandem``
itself loads nothing.

Example:
    >>> import tandem
    >>> recipe = tandem.Recipe.load({"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "env": "arithmetic", "steps": 40})
    >>> recipe.options["group_size"]
    8
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tandem.algorithms.advantages.base import Advantage as Advantage
    from tandem.algorithms.losses.base import Loss as Loss
    from tandem.algorithms.losses.base import MicroBatch as MicroBatch
    from tandem.algorithms.losses.base import TokenLoss as TokenLoss
    from tandem.api.recipe import Recipe as Recipe
    from tandem.api.run import MetricsTable as MetricsTable
    from tandem.api.run import Run as Run
    from tandem.api.run import compare as compare
    from tandem.api.run import evaluate as evaluate
    from tandem.api.run import train as train
    from tandem.engines.base import Engine as Engine
    from tandem.envs.base import Chat as Chat
    from tandem.envs.base import Environment as Environment
    from tandem.errors import TandemError as TandemError
    from tandem.optimizers.base import Optimizer as Optimizer
    from tandem.rewards.base import GroupReward as GroupReward
    from tandem.rewards.base import Reward as Reward
    from tandem.types import Completion as Completion
    from tandem.types import Group as Group
    from tandem.types import Message as Message
    from tandem.types import Rollout as Rollout
    from tandem.types import Sampling as Sampling
    from tandem.types import Task as Task
    from tandem.weight_sync.base import WeightSync as WeightSync

_MODULES = {
    "tandem.api.run": ("train", "evaluate", "compare", "Run", "MetricsTable"),
    "tandem.api.recipe": ("Recipe",),
    "tandem.envs.base": ("Environment", "Chat"),
    "tandem.rewards.base": ("Reward", "GroupReward"),
    "tandem.algorithms.advantages.base": ("Advantage",),
    "tandem.algorithms.losses.base": ("Loss", "MicroBatch", "TokenLoss"),
    "tandem.optimizers.base": ("Optimizer",),
    "tandem.engines.base": ("Engine",),
    "tandem.weight_sync.base": ("WeightSync",),
    "tandem.types": ("Task", "Message", "Sampling", "Completion", "Rollout", "Group"),
    "tandem.errors": ("TandemError",),
}
"""Public names by the module that defines them; the imports above say the same to type checkers."""
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}; its names: {', '.join(_PUBLIC)}", name=name)
    import importlib

    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
