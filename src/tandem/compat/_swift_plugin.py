"""Reward classes of ms-swift's plug-in files, which put them into ``swift.plugin.orms`` by name."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError, RewardError
from tandem.rewards._calls import Adapter, Called, plain, said

KIND = f"{__name__}:Plugin"
"""How a recipe names the reward."""


@dataclass(frozen=True, kw_only=True)
class Plugin(Adapter):
    """A reward that a plug-in file has registered; completions and columns reach it as in ms-swift."""

    registered: str
    """Its name in ``orms``."""
    files: tuple[str, ...]
    """The plug-in files, run in order."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("files must name the plug-in's files")

    def prepare(self) -> None:
        """Run the files.

        Raises:
            RewardError: one fails, or none registers the name.
        """
        try:
            self.called()
        except RewardError:
            raise
        except Exception as error:  # user code may raise anything while it is run
            raise RewardError(f"reward {self.registered!r} of {', '.join(self.files)} fails: {said(error)}") from error

    def called(self) -> Called:
        rewards = registered(self.files)
        if self.registered not in rewards:
            known = ", ".join(sorted(rewards)) or "nothing"
            raise RewardError(f"{', '.join(self.files)} registers no reward {self.registered!r}; in orms is: {known}")
        thing = rewards[self.registered]
        return plain(thing() if isinstance(thing, type) else thing, text=True)

    @property
    def full_marks(self) -> None:
        return None


def registered(files: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """Every reward that plug-in files register, by name; raises whatever they raise."""
    with _library() as rewards:
        for file in files:
            path = Path(file).absolute()
            if not path.is_file():
                raise RewardError(f"there is no plug-in file {file}")
            name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
            if str(path.parent) not in sys.path:
                sys.path.append(str(path.parent))  # modules beside it
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise RewardError(f"{file} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # classes are looked up by the module they say
            spec.loader.exec_module(module)
        return dict(rewards)


@contextmanager
def _library() -> Iterator[dict[str, Callable[..., Any]]]:
    """What plug-ins import of ms-swift: its own where it is installed, else as much as registering needs."""
    if importlib.util.find_spec("swift") is not None:
        yield importlib.import_module("swift.plugin").orms
        return
    orms: dict[str, Callable[..., Any]] = {}
    # ``rm_plugins`` and ``multi_turns`` may be written to in the same file; nothing reads them.
    names = {"ORM": _Reward, "AsyncORM": _Reward, "orms": orms, "rm_plugins": {}, "multi_turns": {}}
    made = {name: ModuleType(name) for name in ("swift", "swift.plugin", "swift.plugin.orm", "swift.rewards",
                                                "swift.rewards.orm", "swift.utils")}  # fmt: skip
    for name, module in made.items():
        module.__path__ = []
        if name != "swift.utils":
            module.__dict__.update(names)
    made["swift.utils"].__dict__["get_logger"] = lambda *_, **__: logging.getLogger("swift")
    sys.modules.update(made)
    try:
        yield orms
    finally:
        for name in made:
            sys.modules.pop(name, None)


class _Reward:
    """What reward classes of plug-ins derive from."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args
