"""TextArena's games for one player."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.envs._game import Game
from tandem.types import Json


@dataclass(frozen=True, kw_only=True)
class TextArena(Game):
    """Any game of TextArena for one player, with the game's own reward at its end."""

    id: str
    """Name of the game, such as Wordle-v0; with ``-raw`` behind it each message has only what is new, and without it
    what its default wrappers make of that, mostly the whole game again."""
    args: dict[str, Json] = field(default_factory=dict)
    """What else ``textarena.make`` is given."""
