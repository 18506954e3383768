"""TRL's names of a step's numbers, by which people who come from it look for them in a logger."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRL: Mapping[str, str] = {
    "reward_std": "reward/group_std",
    "frac_reward_zero_std": "groups/zero_variance",
    "completions/mean_length": "length",
    "completions/min_length": "length/min",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "rollouts/truncated",
    "completions/mean_terminated_length": "length/ended",
    "completions/min_terminated_length": "length/ended/min",
    "completions/max_terminated_length": "length/ended/max",
    "kl": "kl_reference",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction/low",
    "clip_ratio/high_mean": "clip_fraction/high",
    "cispo_clip_ratio": "clip_fraction/high",
    "sampling/sampling_logp_difference/max": "logprob_gap/max",
    "sampling/importance_sampling_ratio/mean": "correction/weight",
    "learning_rate": "lr",
    "step_time": "seconds/step",
}
"""TRL's name and Tandem's. ``reward``, ``entropy``, ``loss`` and ``grad_norm`` are called alike."""


def with_trl_names(scalars: Mapping[str, float]) -> dict[str, float]:
    """A step's numbers, and by TRL's names those that it has; a reward is called by the last part of its path."""
    named = {alias: scalars[name] for alias, name in TRL.items() if name in scalars}
    for name, mean in scalars.items():
        if name.startswith("reward/") and (std := scalars.get(f"{name}/std")) is not None:
            function = re.split("[.:/]", name)[-1]
            named |= {f"rewards/{function}/mean": mean, f"rewards/{function}/std": std}
    return {**scalars, **named}
