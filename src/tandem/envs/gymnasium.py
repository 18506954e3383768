"""Environments of gymnasium whose observations and actions are texts, or whose actions are numbered."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.envs._game import Game
from tandem.types import Json


@dataclass(frozen=True, kw_only=True)
class Gymnasium(Game):
    """Any text environment of gymnasium. Where actions are numbered, the last number of a reply is the action."""

    id: str
    """Name of the environment, as ``gymnasium.make`` takes it; ``my_module:Name-v0`` imports the module first."""
    args: dict[str, Json] = field(default_factory=dict)
    """What else ``gymnasium.make`` is given; with ``render_mode: ansi`` observations are drawn as text."""
