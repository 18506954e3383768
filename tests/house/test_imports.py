"""What loads what: help is instant, and light modules stay light when they are imported for real."""

from __future__ import annotations

import os
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
HEAVY = {
    "accelerate", "datasets", "math_verify", "pandas", "peft", "pyarrow", "reasoning_gym", "safetensors", "sympy",
    "tensorboard", "torch", "trackio", "transformers", "vllm", "wandb",
}  # fmt: skip
TORCH_FREE = [
    "types", "metrics", "errors", "config", "envs", "algorithms.curricula", "rewards", "algorithms.advantages",
    "observability", "rollout", "agents", "cli.app",
    "tandem_broker.server", "tandem_broker.producer", "tandem_broker.remote_engine",
]  # fmt: skip


def loaded(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after running ``code``."""
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nsys.stderr.write('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert out.returncode == 0, out.stderr
    return {line.partition(".")[0] for line in out.stderr.splitlines()}


def with_modules(name: str) -> list[str]:
    """A module, of tandem unless it says otherwise, and every module in it."""
    package = name if name.startswith("tandem_broker") else f"tandem.{name}"
    folder = SRC / package.replace(".", "/")
    inside = [m.name for m in pkgutil.walk_packages([str(folder)], f"{package}.")] if folder.is_dir() else []
    return [package, *inside]


def test_help_loads_nothing_heavy() -> None:
    code = "import contextlib\nfrom tandem.cli.app import main\nwith contextlib.suppress(SystemExit): main(['--help'])"
    assert not loaded(code) & HEAVY


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_FREE)
def test_light_modules_load_nothing_heavy(name: str) -> None:
    assert not loaded("\n".join(f"import {module}" for module in with_modules(name))) & HEAVY


def test_a_grading_process_starts_without_asyncio() -> None:
    """Which is as much as all else that it imports, for what most rewards have no use for."""
    assert "asyncio" not in loaded("import tandem.rewards.grading.grader, tandem.rewards.number")


READS = {
    "a typo": ["check", "recipes/quickstart.yaml", "group_siz=3"],
    "list": ["list"],
    "options": ["list", "optimizers"],
    "schema": ["schema"],
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", READS.values(), ids=READS)
def test_what_reads_options_alone_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import contextlib\nfrom tandem.cli.app import main\nwith contextlib.suppress(SystemExit): main({arguments})"
    )
    assert not loaded(code) & HEAVY


@pytest.mark.slow
def test_every_part_is_found_without_torch() -> None:
    find = "[[resolve.find(category, kind) for kind in resolve.names(category)] for category in resolve.CATEGORIES]"
    code = f"from tandem.config import registry as resolve\n{find}"
    assert not loaded(code) & HEAVY


@pytest.mark.slow
def test_help_answers_at_once() -> None:
    """Under 0.5 s of processor time: unlike time on the wall, it does not depend on what else the machine does."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "tandem", "--help"],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5
