"""Environments on an OpenEnv server."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.envs._game import Game
from tandem.errors import ConfigError, bounded


@dataclass(frozen=True, kw_only=True)
class OpenEnv(Game):
    """An environment that an OpenEnv server offers, over OpenEnv's own client."""

    url: str = ""
    """The server's URL, such as http://127.0.0.1:8000."""
    command: str = ""
    """Instead of a URL, what starts the server at {port}; it ends with the run."""
    action: str = "message"
    """Field of the action that the policy's reply is."""
    observation: str = ""
    """Field of the observation that the policy reads; empty: all of it, as JSON."""
    concurrency: int = bounded(1, least=1)
    """Episodes at once, of which a server allows one unless it was told otherwise (``max_concurrent_envs``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.url) == bool(self.command):
            raise ConfigError("openenv needs a url, or the command that starts a server: give one of them")
