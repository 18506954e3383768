"""Stands for ms-swift where a plug-in imports it and it is not installed.

Rewards are registered and built-in ones are computed by Tandem's own; whatever else of ms-swift is imported may be
derived from and named in annotations, and says what it is as soon as it is used.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from tandem.config.registry import find
from tandem.types import Completion, Json, Message, Rollout, Task, Turn
from tandem_compat.swift.options import RLHF
from tandem_compat.swift.rewards import built_in

Registry = dict[str, Callable[..., Any]]

_TABLE = {name: argument for argument in RLHF for name in (argument.name, *argument.also)}
_PARTS = frozenset({"llm", "multi_turn", "orm", "plugin", "rewards", "rollout", "utils"})
"""Modules that may be reached as attributes of others."""


class SwiftArguments:
    """The arguments that a reward may look at, as attributes and as items; what was not given has its default."""

    def __init__(self, values: Mapping[str, Json]) -> None:
        """Those that were given, by name."""
        self._values = values

    def __getitem__(self, name: str) -> Any:
        argument = _TABLE[name]
        value = self._values.get(argument.name, argument.default)
        if value is None and argument.name in ("cosine_max_len", "soft_max_length"):
            return self["max_completion_length"]
        if value is None and argument.name == "output_dir":
            return str(Path("output") / Path(self["model"] or "").name)
        return value

    def __getattr__(self, name: str) -> Any:
        if name in _TABLE:
            return self[name]
        raise AttributeError(f"ms-swift's arguments have no {name!r} here")


class Orm:
    """Base class of reward classes in plug-ins."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args


class SchedulerBase:
    """Base class of schedulers in plug-ins: after each answer they decide whether and how the conversation goes on."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *_: Any, **options: Any) -> None:
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self.tokenizer = options.get("tokenizer")

    async def on_trajectory_start(self, requests: Sequence[Any]) -> None:
        """Called before the first answer."""

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """Called after each answer; may return ``done`` and ``rollout_infos``."""
        return {}

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Whether an answer was the last: it was cut, or there were as many as may be."""
        cut = response_choice.finish_reason == "length"
        return cut or (self.max_turns is not None and current_turn >= self.max_turns)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """What is said after an answer: ``infer_request`` with more messages."""
        raise NotImplementedError(f"{type(self).__name__} has no step, and a run of its own is not called here")


class BuiltIn(Orm):
    """A built-in reward, called as ms-swift calls it and computed as a recipe's."""

    reward: ClassVar[str]
    """Its name."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        options = built_in(self.reward, args if isinstance(args, SwiftArguments) else SwiftArguments({}))
        self._scale = options.pop("scale", 1.0)
        if "accuracy" in options:
            options["accuracy"] = find("rewards", options["accuracy"])()
        self._score = find("rewards", options.pop("kind"))(**options)
        self._score.prepare()

    def __call__(
        self,
        completions: Sequence[str],
        solution: Sequence[str] | None = None,
        response_token_ids: Sequence[Sequence[Any]] | None = None,
        **_: Any,
    ) -> list[float]:
        """One reward per completion; those of length need ``response_token_ids``, accuracy and cosine ``solution``."""
        needed = {"accuracy": (solution,), "cosine": (solution, response_token_ids), "soft_overlong": (
            response_token_ids,)}.get(self.reward, ())  # fmt: skip
        if None in needed:
            raise TypeError(f"orms[{self.reward!r}] needs solution and response_token_ids; hand the columns on to it")
        golds = solution or [""] * len(completions)
        ids = response_token_ids or [[]] * len(completions)
        plays = (
            _play(text, str(gold), _flattened(own)) for text, gold, own in zip(completions, golds, ids, strict=True)
        )
        return [self._scale * float(self._score(play)) for play in plays]


def orms() -> Registry:
    """ms-swift's registry of rewards where it is installed, else one in its place, which plug-ins find from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        for name in ("swift.rewards", "swift.plugin"):
            try:
                registry: Registry = importlib.import_module(name).orms
            except ImportError:
                continue
            return registry
        sys.meta_path.append(_Finder())  # last, so that whatever is installed is found first
    _ORMS.clear()  # those of other plug-ins are none of this one's business
    _ORMS.update(_BUILT_IN)
    _TURNS.clear()
    return _ORMS


def multi_turns() -> Registry:
    """The same for schedulers; to be called after ``orms``."""
    for name in ("swift.rollout.multi_turn", "swift.plugin.multi_turn"):
        try:
            registry: Registry = importlib.import_module(name).multi_turns
        except ImportError:
            continue
        return registry
    return _TURNS


def _play(text: str, gold: str, tokens: tuple[int, ...]) -> Rollout:
    """A completion as a rollout, of which only text, tokens and gold answer are known."""
    completion = Completion(tokens=tokens, logprobs=(0.0,) * len(tokens), versions=(0,) * len(tokens), finish="stop")
    return Rollout(
        id="plugin/0",
        task=Task(id="plugin", env="swift", prompt=(), answer=gold),
        turns=(Turn(prompt=(), completion=completion, temperature=1.0),),
        messages=(Message(role="assistant", content=text),),
        status="ok",
    )


def _flattened(ids: Sequence[Any]) -> tuple[int, ...]:
    """Token ids of all turns; they may be in a list for each turn."""
    return tuple(one for part in ids for one in (part if isinstance(part, (list, tuple)) else (part,)))


class _Absent(type):
    """The class of what is not here."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{_origin(cls)} is ms-swift's own, which is not installed, and has no stand-in here")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{_origin(cls)} is ms-swift's own, which is not installed, so there is no {name!r} of it")

    def __setitem__(cls, name: str, thing: Any) -> None:
        """Registries such as ``rm_plugins`` and ``envs`` may be written to; nothing here reads them."""


def _origin(cls: type) -> str:
    """The name by which what is not here was imported, be it by a class that derives from it."""
    return next(f"{base.__module__}.{base.__name__}" for base in cls.__mro__ if "_absent" in vars(base))


class _Module(ModuleType):
    """Any module of ms-swift."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _PARTS:
            return importlib.import_module(f"{self.__name__}.{name}")
        absent = _Absent(name, (), {"__module__": self.__name__, "_absent": True})
        setattr(self, name, absent)
        return absent


class _Finder(MetaPathFinder, Loader):
    """Finds every module of ms-swift."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "swift" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_HERE)


_CLASSES: dict[str, type[BuiltIn]] = {
    name: type(name, (BuiltIn,), {"reward": reward})
    for reward, name in {
        "accuracy": "MathAccuracy",
        "format": "Format",
        "cosine": "CosineReward",
        "repetition": "RepetitionPenalty",
        "soft_overlong": "SoftOverlong",
    }.items()
}
_BUILT_IN: Registry = {cls.reward: cls for cls in _CLASSES.values()}
_ORMS: Registry = {}
_TURNS: Registry = {}
_HERE: dict[str, Any] = {
    **_CLASSES,
    "ORM": Orm,
    "AsyncORM": Orm,
    "orms": _ORMS,
    "multi_turns": _TURNS,
    "RolloutScheduler": SchedulerBase,
    "MultiTurnScheduler": SchedulerBase,
    "get_logger": lambda *_, **__: logging.getLogger("swift"),
}
"""What is there, whichever module it is imported from."""
