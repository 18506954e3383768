"""What every example and every tried option of Axolotl, ms-swift and Atropos comes to: recipe, notes and refusals.

``compat_golden.json`` holds them: of each system the recipe of its least file or command line (``base``), and for each
case what differs from it. ``pytest --golden`` writes it anew; look at the difference before it is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit import test_atropos, test_axolotl, test_documents, test_swift
from unit.test_documents import BLOCKS, SERVED, TRAINED, given, here, swift_files

from tandem.compat import swift
from tandem.config.loading import load
from tandem.errors import TandemError

__all__ = ["here"]

GOLDEN = Path(__file__).with_name("compat_golden.json")
Result = dict[str, Any]
Check = Callable[[str, Mapping[str, Result]], None]


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Compare a system's results with the file, or with ``--golden`` write them there."""

    def compare(system: str, results: Mapping[str, Result]) -> None:
        known = json.loads(GOLDEN.read_text())
        short = json.loads(json.dumps(shortened(results)))
        if request.config.getoption("--golden"):
            GOLDEN.write_text(written(known | {system: short}))
            return
        assert list(short) == list(known[system])
        for name, result in short.items():
            assert {name: result} == {name: known[system][name]}

    return compare


def written(systems: Mapping[str, Mapping[str, Result]]) -> str:
    """A line for each case."""
    parts = [
        f"{json.dumps(system)}: {{\n"
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(cases[n], sort_keys=True)}" for n in cases)
        for system, cases in sorted(systems.items())
    ]
    return "{\n" + "\n},\n".join(parts) + "\n}\n}\n"


def shortened(results: Mapping[str, Result]) -> dict[str, Result]:
    """Recipes as paths and values, all but the first by their difference from it, and notes without the first's."""
    base = flat(results["base"]["recipe"])
    notes = results["base"]["notes"]
    short: dict[str, Result] = {"base": results["base"]}
    for name, result in sorted(results.items()):
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
    return dict(sorted(short.items()))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by their dotted path; lists are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: one for key, value in tree.items() for path, one in flat(value, f"{prefix}.{key}"[not prefix :]).items()
    }


def outcome(translate: Callable[[], tuple[Any, Any]]) -> Result:
    """What a translation returns, or why it refuses."""
    try:
        recipe, notes = translate()
    except TandemError as error:
        return {"refused": str(error).replace(str(Path.cwd()), "HERE")}
    return {"recipe": recipe, "notes": list(notes)}


def axolotl(data: dict[str, Any], *, serving: bool = False) -> Result:
    """What an Axolotl file comes to; of the data's options, which the recipe repeats, the kind alone is kept."""

    def translate() -> tuple[Any, Any]:
        Path("a.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        loaded = load(Path("a.yaml"), ("matmul=dtype", "engine.sleep=0") if data.get("fp8") else (), serving=serving)
        options: dict[str, Any] = json.loads(json.dumps(loaded.options))
        assert list(options["env"].pop("cfg")) == list(data)
        return options, loaded.notes

    return outcome(translate)


@pytest.mark.slow
def test_axolotls_files_come_to_what_they_did(here: Path, check: Check) -> None:
    (here / "axolotl_rewards.py").write_text(test_axolotl.REWARDS)
    rows = (here / "rows.jsonl").read_text().splitlines()
    (here / "few.jsonl").write_text("\n".join(rows[:4]))
    laid = test_axolotl.laid
    results = {"base": axolotl(laid({}))}
    for name, (file, block) in BLOCKS.items():
        under, over = (yaml.safe_load(text) or {} for text in (file, block))
        data = test_documents.laid(under, over) if file else over
        results[f"example {name}"] = axolotl(data)
        results[f"example {name}, served"] = axolotl(data, serving=True)
    for name, (changes, _) in (test_axolotl.CHANGES | test_axolotl.REFUSED).items():
        results[f"option {name}"] = axolotl(laid(changes))
    for name, (value, _) in test_axolotl.SERVED.items():
        results[f"server {name}"] = axolotl(laid({"trl.use_vllm": True, name: value}), serving=True)
    for path, option in test_axolotl.every():
        name = path.removeprefix("datasets.")
        if name != path:
            results[f"data {path}"] = axolotl(laid({"datasets": [{"path": "rows.jsonl", name: 3}]}))
        else:
            results[f"other {path}"] = axolotl(laid({path: {"x": [1]} if option.becomes else "something"}))
    check("axolotl", results)


def command(line: str, gpus: int = 1) -> Result:
    """What ``swift rlhf`` comes to."""

    def translate() -> tuple[Any, Any]:
        visible = ",".join(map(str, range(gpus)))
        found = swift.rlhf(given(line), {"CUDA_VISIBLE_DEVICES": visible})
        return found.options, found.notes

    return outcome(translate)


def served(line: str) -> Result:
    """What ``swift deploy`` comes to."""

    def translate() -> tuple[Any, Any]:
        names = {name for argument in test_swift.DEPLOY for name in (argument.name, *argument.also)}
        found = swift.deploy({name: words for name, words in given(f"--model m {line}").items() if name in names})
        return found.options, [*found.notes, *found.environ]

    return outcome(translate)


@pytest.mark.slow
def test_ms_swifts_command_lines_come_to_what_they_did(here: Path, check: Check) -> None:
    swift_files(here)
    (here / "mine.py").write_text(
        "from swift.plugin import orms\norms['mine'] = lambda completions, **_: completions\n"
    )
    (here / "system.txt").write_text("Think.\n")
    (here / "d.jsonl").write_text((here / "rows.jsonl").read_text())
    results = {"base": command(test_swift.START)}
    for name, (line, gpus) in TRAINED.items():
        results[f"example {name}"] = command(f"--rlhf_type grpo --model Qwen/Qwen2.5-7B {line}", gpus)
    for line, _ in (*test_swift.CHANGES, *test_swift.REFUSED, *test_swift.TOLD):
        names = test_swift.words(line)
        start = {name: words for name, words in test_swift.words(test_swift.START).items() if name not in names}
        first = " ".join(f"--{name} {word}" for name, words in start.items() for word in words)
        results[f"line {line}"] = command(f"{first} {line}")
    for argument in test_swift.RLHF:
        if not argument.becomes:
            value = {"whole": "3", "number": "0.3", "truth": "true", "mapping": "'{\"a\":1}'"}.get(argument.takes, "x")
            for place in ("", test_swift.COLOCATE, test_swift.SERVER) if argument.where else ("",):
                line = f"--{argument.name} {value} {place}".strip()
                results[f"other {line}"] = command(f"{test_swift.START} {line}")
        results[f"wrong {argument.name}"] = command(f"{test_swift.START} --{argument.name} ?")
    check("swift", results)
    check("swift deploy", {"base": served(""), **{f"example {name}": served(line) for name, line in SERVED.items()},
                           **{f"line {line}": served(line) for line, _ in test_swift.DEPLOYED},
                           **{f"other {a.name}": served(f"--{a.name} 3") for a in test_swift.DEPLOY}})  # fmt: skip


def flags(options: Mapping[str, Any], environ: Mapping[str, str]) -> Result:
    """What ``atropos-grpo`` comes to."""

    def translate() -> tuple[Any, Any]:
        own = {"model_name": "m", "env": "arithmetic", **options}
        found = test_atropos.translate(test_atropos.TrainerFlags(**own), frozenset(own), environ)
        return found.options, [*found.notes, *found.environ.items()]

    return outcome(translate)


def lines() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """TrainerFlags, each with and without a way of its own, and what the environment says."""
    for one, _ in (*test_atropos.CHANGES.values(), *test_atropos.REFUSED.values(), *test_atropos.NOTED.values()):
        yield one, {}
        for way in ("shared_vllm", "lora_nccl", "lora_restart"):
            yield {"weight_bridge_mode": way, **one}, {}
    for nodes in ("1", "x"):
        yield {"weight_bridge_mode": "shared_vllm"}, {"NUM_INFERENCE_NODES": nodes}
    yield {"init_method": "env://", "weight_bridge_mode": "lora_nccl", "nccl_init_method": "env://"}, {}
    yield {"device": "cuda:1"}, {"CUDA_VISIBLE_DEVICES": "3,5", "LOGDIR": "there"}
    yield {"use_wandb": True, "wandb_project": "p", "wandb_group": "g"}, {}


def test_the_flags_of_atropos_trainer_come_to_what_they_did(check: Check) -> None:
    named = {" ".join(f"{key}={value}" for key, value in [*one.items(), *env.items()]): (one, env)
             for one, env in lines()}  # fmt: skip
    check("atropos", {"base": flags({}, {}), **{name: flags(*line) for name, line in named.items()}})
