"""TRL's names over Tandem's trainer: ``from tandem.trl import GRPOConfig, GRPOTrainer``.

``tandem_compat`` has them, and is found by the entry points ``tandem.trl``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_compat.trl.rewards import accuracy_reward as accuracy_reward
    from tandem_compat.trl.rewards import reasoning_accuracy_reward as reasoning_accuracy_reward
    from tandem_compat.trl.rewards import think_format_reward as think_format_reward
    from tandem_compat.trl.trainer import GRPOConfig as GRPOConfig
    from tandem_compat.trl.trainer import GRPOTrainer as GRPOTrainer


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    for point in entry_points(group="tandem.trl", name=name):
        return point.load()
    raise AttributeError(
        f"tandem.trl has no {name!r}; of TRL it has GRPOConfig, GRPOTrainer, accuracy_reward, "
        "reasoning_accuracy_reward and think_format_reward; rewards by length and repetition are kinds of "
        "tandem list rewards",
        name=name,
    )
