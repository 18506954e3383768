"""Rewards of ms-swift's plug-in files, which put them into its registry ``orms`` by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from tandem.errors import DOCS, RewardError
from tandem.importing import importing
from tandem.rewards.grading.calls import Called, FunctionReward, awaits, keywords
from tandem.types import Json, Rollout
from tandem_compat.swift.options import RLHF

KIND = f"{__name__}:PluginReward"
"""How a recipe names the reward."""
_MODULES = ("swift.rewards", "swift.plugin")
"""Modules of ms-swift that have the registry, by release."""

Registered = Mapping[str, Any]
"""Classes and functions by the names that plug-in files register them under."""


@dataclass(frozen=True, kw_only=True)
class PluginReward(FunctionReward):
    """A reward that a plug-in file has registered; completions and columns reach it as in ms-swift."""

    full_marks: ClassVar[None] = None
    """A gold reply proves nothing of it."""

    registered: str
    """Its name in ``orms``."""
    files: tuple[str, ...]
    """The plug-in files, run in order."""
    arguments: dict[str, Json] = field(default_factory=dict)
    """Those of ms-swift's command line, which its class may look at; others have their defaults."""

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: what was made of the files stays in the process that ran them."""
        return {name: value for name, value in vars(self).items() if name != "_called"}

    def called(self) -> Called:
        return self._called

    @cached_property
    def _called(self) -> Called:
        rewards = registered(self.files)
        if self.registered not in rewards:
            known = ", ".join(sorted(rewards)) or "nothing"
            raise RewardError(f"{', '.join(self.files)} registers no reward {self.registered!r}; in orms is: {known}")
        reward = rewards[self.registered]
        if inspect.isclass(reward):
            reward = reward(**_options(reward, self.arguments))
        names, any_name = keywords(reward)
        return Called(
            call=lambda completions, **columns: reward(completions, **columns),  # first, whatever the reward calls them
            shape="columns",
            is_async=awaits(reward),
            accepts=None if any_name else names | {"completions"},
            text=True,
            more=_columns,
        )


def registered(files: Sequence[str]) -> Registered:
    """Every reward that plug-in files register, by name; in one process they are run once.

    Raises:
        RewardError: there is no such file, or it needs ms-swift, which is not installed.
    """
    for file in files:
        if not Path(file).is_file():
            raise RewardError(f"there is no plug-in file {file}")
    return _run(tuple((file, str(Path(file).absolute())) for file in files))


@cache
def _run(files: tuple[tuple[str, str], ...]) -> Registered:
    """Rewards that files register, named as given and in full; raises whatever they raise."""
    sys.path += [folder for _, place in files if (folder := str(Path(place).parent)) not in sys.path]  # modules beside
    before = dict(_registry())
    for file, place in files:
        name = f"{Path(place).stem}_{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"
        spec = importlib.util.spec_from_file_location(name, place)
        if spec is None or spec.loader is None:
            raise RewardError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # classes are looked up by the module they say
        try:
            with importing():
                spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            if error.name != "swift":
                raise
            raise RewardError(
                f"{file} imports ms-swift, which is not installed here; install it (pip install ms-swift), or write "
                f"the reward as a function and name it in a recipe's rewards ({DOCS}/guide/rewards/)"
            ) from error
    return {key: thing for key, thing in _registry().items() if before.get(key) is not thing}


def _registry() -> Registered:
    """The registry ``orms``, wherever ms-swift's release has it; empty where it is not installed."""
    for place in _MODULES:
        with suppress(ImportError):
            registry: Registered = importlib.import_module(place).orms
            return registry
    return {}


def _options(made: type, values: Mapping[str, Json]) -> dict[str, Any]:
    """What a class of rewards is made with: ``args``, and single arguments and the tokenizer if it names them."""
    if "__init__" not in {name for base in made.__mro__[:-1] for name in vars(base)}:
        return {}
    names, any_name = keywords(made)
    args = _arguments(values)
    options = {name: value for name, value in vars(args).items() if name in names}
    if "args" in names or any_name:
        options["args"] = args
    if "tokenizer" in names:
        from tandem.model.policy import load_tokenizer

        options["tokenizer"] = load_tokenizer(args.model)
    return options


def _arguments(values: Mapping[str, Json]) -> SimpleNamespace:
    """ms-swift's arguments, by older names too; those that were not given have their defaults."""
    known = {name: values.get(row.name, row.default) for row in RLHF for name in (row.name, *row.also)}
    for name in ("cosine_max_len", "soft_max_length"):
        known[name] = known[name] or known["max_completion_length"]
    known["output_dir"] = known["output_dir"] or str(Path("output") / Path(known["model"] or "").name)
    return SimpleNamespace(**known)


def _columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What ms-swift hands on beside the columns of the data: the conversation has the completion as its last turn."""
    return {
        "messages": [[m.as_dict() for m in r.messages] for r in rollouts],
        "response_token_ids": [[t for turn in r.turns for t in turn.completion.tokens] for r in rollouts],
        "prompt_id": [r.task.id for r in rollouts],
        "request_id": [r.id for r in rollouts],
        "finish_reason": [r.turns[-1].completion.finish if r.turns else None for r in rollouts],
        "is_truncated": [r.truncated for r in rollouts],
        "rollout_infos": [{**r.metrics, "num_turns": max(1, len(r.turns))} for r in rollouts],
    }
