"""What every example and every tried option of Axolotl, ms-swift and Atropos comes to: recipe, notes and refusals.

``compat_golden.json`` holds what is read and what it comes to (see ``compat_cases``). A new case is a line with its
``given``; ``pytest --golden`` writes down what all come to. Look at the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.compat_cases import (
    GOLDEN,
    OVERRIDES,
    SWIFT,
    axolotl_file,
    axolotl_files,
    cases,
    forget_swift,
    swift_files,
    swift_words,
)

from tandem.config.loading import from_options, load
from tandem.errors import TandemError
from tandem.trainer.ranks.layout import check_config
from tandem_broker.recipe import from_options as work_options
from tandem_compat import swift
from tandem_compat.atropos.environment import translate as translate_environment
from tandem_compat.atropos.options import ENVIRONMENT, SERVER, TRAINER
from tandem_compat.atropos.rules import RunningEngine, read
from tandem_compat.atropos.server import translate as translate_server
from tandem_compat.axolotl.options import GROUPS
from tandem_compat.swift.options import DEPLOY, RLHF
from tandem_compat.table import ForeignOption

Source = dict[str, Any]
Result = dict[str, Any]
Translate = Callable[[Source], tuple[Any, Any]]
Check = Callable[..., None]


@pytest.fixture
def here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the cases name, and none of the modules that other tests made and imported."""
    others = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(others):
            monkeypatch.delitem(sys.modules, name)
    forget_swift(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Translate a system's cases, and those that its table makes; compare with the file, or write them with --golden.

    Examples must load, too, and their parts go together.
    """

    def compare(system: str, translate: Translate, made: Mapping[str, Source] | None = None) -> None:
        known = cases(system)
        sources = {name: case["given"] for name, case in known.items() if "given" in case} | dict(made or {})
        results = {name: outcome(translate, one) for name, one in sources.items()}
        short = shortened(results)
        for name in sources.keys() - (made or {}).keys():
            short[name] = {"given": sources[name], **short[name]}
        short = json.loads(json.dumps(short))
        if request.config.getoption("--golden"):
            GOLDEN.write_text(written(json.loads(GOLDEN.read_text()) | {system: short}))
            return
        assert sorted(short) == sorted(known)
        for name, result in short.items():
            assert {name: result} == {name: known[name]}

    return compare


def written(systems: Mapping[str, Mapping[str, Result]]) -> str:
    """A line for each case."""
    parts = [
        f"{json.dumps(system)}: {{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(cases[n])}" for n in cases)
        for system, cases in sorted(systems.items())
    ]
    return "{\n" + "\n},\n".join(parts) + "\n}\n}\n"


def shortened(results: Mapping[str, Result]) -> dict[str, Result]:
    """Recipes as paths and values, all but the first by their difference from it, and notes without the first's."""
    base = flat(results["base"]["recipe"])
    notes = results["base"]["notes"]
    short: dict[str, Result] = {"base": results["base"]}
    for name, result in results.items():
        if "refused" in result:
            short[name] = result
        elif name != "base":
            own = flat(result["recipe"])
            parts = {
                "recipe": {path: value for path, value in own.items() if path not in base or base[path] != value},
                "without": sorted(set(base) - set(own)),
                "notes": [note for note in result["notes"] if note not in notes],
                "no_notes": [note for note in notes if note not in result["notes"]],
            }
            short[name] = {part: value for part, value in parts.items() if value}
    return {name: short[name] for name in sorted(short, key=lambda name: (name != "base", name))}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by their dotted path; lists are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: one
        for key, value in sorted(tree.items())
        for path, one in flat(value, f"{prefix}.{key}"[not prefix :]).items()
    }


def outcome(translate: Translate, source: Source) -> Result:
    """What a translation returns, or why it refuses."""
    try:
        recipe, notes = translate(source)
    except TandemError as error:
        head, *lines = str(error).replace(str(Path.cwd()), "HERE").split("\n")
        return {"refused": "\n".join([head, *sorted(lines)])}
    return {"recipe": recipe, "notes": sorted(map(str, notes))}


def loads(recipe: Any, *overrides: str) -> None:
    """A recipe that a run would take."""
    check_config(from_options(recipe, overrides, Path("x")).config)


# Axolotl


def axolotl(source: Source) -> tuple[Any, Any]:
    """What an Axolotl file comes to; of the data's options, which the recipe repeats, the kind alone is kept."""
    text = axolotl_file(source)
    Path("a.yaml").write_text(text)
    overrides = OVERRIDES[:1] if "fp8: true" in text else ()
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"} | source.get("environ", {})):
        loaded = load(Path("a.yaml"), overrides, serving=source.get("serving", False))
        if ("file" in source or "environ" in source) and not loaded.config.compile:  # which torch is asked for
            check_config(loaded.config)
    options: dict[str, Any] = json.loads(json.dumps(loaded.written))
    options["env"].pop("cfg")
    return options, loaded.notes


def axolotl_rows() -> Iterator[tuple[str, Source]]:
    """A value for each option that becomes nothing, and one of another type for the others."""
    for group, options in GROUPS.items():
        for name, option in options.items():
            if name == "special_tokens":
                continue  # which are compared with the tokenizer's
            if group == "datasets":
                yield f"data datasets.{name}", {"changes": {"datasets": [{"path": "rows.jsonl", name: 3}]}}
            else:
                path = f"{group}.{name}".lstrip(".")
                yield f"other {path}", {"changes": {path: {"x": [1]} if option.becomes else "something"}}


@pytest.mark.slow
def test_axolotls_files_come_to_what_they_did(here: Path, check: Check) -> None:
    axolotl_files(here)
    check("axolotl", axolotl, dict(axolotl_rows()))


# ms-swift


def command(source: Source) -> tuple[Any, Any]:
    """What ``swift rlhf`` comes to."""
    words = swift_words(source["line"]) if "line" in source else swift_words(SWIFT) | swift_words(source["changes"])
    translation = swift.rlhf(words, {"CUDA_VISIBLE_DEVICES": "0"} | source.get("environ", {}))
    if "line" in source or "environ" in source:
        loads(translation.options, *(OVERRIDES[1:] if "sleep" in translation.options["engine"] else ()))
    return translation.options, translation.notes


def served(source: Source) -> tuple[Any, Any]:
    """What ``swift deploy`` comes to."""
    translation = swift.deploy({"model": ["m"]} | swift_words(source["line"], DEPLOY))
    loads(translation.options)
    return translation.options, [*translation.notes, *translation.environ]


PLACES = (
    "",
    "--use_vllm true --vllm_mode colocate",
    "--use_vllm true --vllm_mode server --vllm_server_host node",
    "--train_type full",
    "--reward_model rm",
)


def value_of(argument: ForeignOption) -> str:
    """A value that asks for something."""
    truth = str(argument.default is not True).lower()
    return {"whole": "3", "number": "0.3", "truth": truth, "mapping": "'{\"a\":1}'"}.get(argument.takes, "x")


def swift_rows() -> Iterator[tuple[str, Source]]:
    """A value for each argument that becomes nothing, in every place, and one of another type for each."""
    for argument in RLHF:
        if not argument.becomes:
            for place in PLACES if argument.where else ("",):
                line = f"--{argument.name} {value_of(argument)} {place}".strip()
                yield f"other {line}", {"changes": line}
        yield f"wrong {argument.name}", {"changes": f"--{argument.name} ?"}


@pytest.mark.slow
def test_ms_swifts_command_lines_come_to_what_they_did(here: Path, check: Check) -> None:
    swift_files(here)
    check("swift", command, dict(swift_rows()))


def test_ms_swifts_engines_come_to_what_they_did(check: Check) -> None:
    rows = {f"other {a.name}": {"line": f"--{a.name} {value_of(a)}"} for a in DEPLOY if not a.becomes}
    wrong = {f"wrong {a.name}": {"line": f"--{a.name} ?"} for a in DEPLOY}
    check("swift deploy", served, rows | wrong)


# Atropos


def flags(source: Source) -> dict[str, Any]:
    """Values of flags whose names have dashes."""
    return {name.replace("_", "-"): value for name, value in source["flags"].items()}


def trainer(source: Source) -> tuple[Any, Any]:
    """What ``atropos-grpo`` comes to."""
    running = RunningEngine(**source["running"]) if "running" in source else None
    own = {"model-name": "m", "env": "arithmetic", **flags(source)}
    translation = read(own).translation(source.get("environ", {}), running)
    loads(translation.options)
    return translation.options, [*translation.notes, *translation.environ.items()]


def server(source: Source) -> tuple[Any, Any]:
    """What ``atropos-server`` comes to."""
    translation = translate_server({"model": "m", **flags(source)}, source.get("rest", {}), source.get("environ", {}))
    loads(translation.options)
    return translation.options, [*translation.notes, *translation.environ.items()]


def environment(source: Source) -> tuple[Any, Any]:
    """What ``tandem env gsm8k serve`` comes to."""
    own = {"env.tokenizer_name": "m", **source["flags"]}
    words = {name: value if value is None else [str(value)] for name, value in own.items()}
    translation = translate_environment("gsm8k", words)
    work_options(translation.options, (), "flags")
    return translation.options, [*translation.notes, *translation.environ.items()]


ATROPOS: dict[str, Translate] = {"atropos": trainer, "atropos server": server, "atropos env": environment}


@pytest.mark.parametrize("system", ATROPOS)
def test_atropos_command_lines_come_to_what_they_did(system: str, check: Check) -> None:
    check(system, ATROPOS[system])


# Nothing is forgotten


OF_FILES = {"deepspeed", "fsdp", "fsdp_config", "trl.generation_kwargs"}
"""Options that name several keys, of which some may change nothing."""


@pytest.mark.parametrize("system", ["axolotl", "swift", *ATROPOS])
def test_an_option_that_is_said_to_change_nothing_changes_nothing(system: str) -> None:
    """Of the cases with one option: the file has their difference from the least one."""
    idle = 0
    for name, case in cases(system).items():
        options = case.get("given", {}).get("changes") or case.get("given", {}).get("flags") or {}
        options = swift_words(options) if isinstance(options, str) else options
        names = tuple(f"{option}: " for option in options if option not in OF_FILES and len(options) == 1)
        notes = [note.removeprefix("--") for note in case.get("notes", ())]
        notes += [note.replace("-", "_") for note in notes]  # as the file has Atropos' flags
        if any("changes nothing" in note for note in notes if note.startswith(names)):
            assert not {"recipe", "without"} & set(case), name
            idle += 1
    assert idle


def options_of(system: str) -> set[str]:
    """Options that some case of a system has; of Axolotl by path."""
    options: set[str] = set()
    for name, case in cases(system).items():
        source = case.get("given", {})
        if "flags" in source:
            options |= set(source["flags"])
        elif system == "axolotl":
            options |= set(source.get("changes", ())) | ({*entry_paths(source["file"])} if "file" in source else set())
        elif not name.startswith(("other", "wrong")):
            table = DEPLOY if system == "swift deploy" else RLHF
            options |= set(swift_words(f"{SWIFT if 'changes' in source else ''} {given_line(source)}", table))
    return options


def given_line(source: Source) -> str:
    return str(source.get("line") or source.get("changes") or "")


def entry_paths(file: Mapping[str, Any]) -> Iterator[str]:
    for name, value in file.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)


def test_every_option_that_becomes_something_is_tried() -> None:
    """With a value that is read; of an entry of Axolotl's ``datasets`` see ``test_axolotl_data``."""
    axolotls = {
        f"{group}.{name}".lstrip(".")
        for group, options in GROUPS.items()
        for name, option in options.items()
        if option.becomes and group != "datasets"
    }
    assert axolotls - options_of("axolotl") == set()
    assert {argument.name for argument in RLHF if argument.becomes} - options_of("swift") == set()
    assert {argument.name for argument in DEPLOY if argument.becomes} - options_of("swift deploy") == set()


def test_every_flag_of_atropos_is_tried() -> None:
    assert set(ENVIRONMENT) - options_of("atropos env") == {"config"}
    for system, table in {"atropos server": SERVER, "atropos": TRAINER}.items():
        assert set(table) - {name.replace("_", "-") for name in options_of(system)} == set()
