"""``tandem doctor``: what this machine has and lacks, checked by trying it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import __version__, clone, machine

DISTRIBUTION = "tandem-rl"
_LITTLE_DISK = 2e9
_LITTLE_MEMORY = 3e9
ENGINE_PYTHON = Path(".venv-engine/bin/python")
"""Where scripts/setup makes an environment for vLLM."""
_IMPORT = "import torch, vllm; print(f'vLLM {vllm.__version__}, torch {torch.__version__}')"
_IMPORT_SECONDS = 180


class Diagnosis(NamedTuple):
    """One thing looked at."""

    state: Literal["ok", "note", "problem"]
    """note: something optional is missing; problem: training cannot work."""
    what: str
    """Its name."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do about it."""


def doctor() -> int:
    """Print every finding; returns the exit code, 1 if there is a problem."""
    problems = 0
    table = Table(box=None, show_header=False, pad_edge=False)
    colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings(Path("runs")):
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n→ {finding.fix}", "bold" if finding.state == "problem" else "")
        table.add_row(Text(finding.state, colours[finding.state]), finding.what, detail)
        problems += finding.state == "problem"
    console = Console()
    console.print(table)
    console.print(f"{problems} problem{'s' * (problems != 1)}" if problems else "ready to train", markup=False)
    return 1 if problems else 0


def findings(folder: Path) -> Iterator[Diagnosis]:
    """Everything that is looked at, in order; ``folder`` is that of the runs."""
    yield Diagnosis("ok", "tandem", f"{__version__}, Python {platform.python_version()}")
    yield from _packages()
    yield from _memory()
    free = machine.free_disk(folder)
    fix = "free some: a checkpoint holds weights, float32 masters and two moments (14 bytes a parameter)"
    yield _judged("disk", f"{machine.readable(free)} free for {folder}", fix if free < _LITTLE_DISK else "")
    yield _vllm()


def _judged(what: str, detail: str, fix: str = "") -> Diagnosis:
    """A note where there is something to do about it."""
    return Diagnosis("note" if fix else "ok", what, detail, fix)


def _packages() -> Iterator[Diagnosis]:
    """What the distribution's own metadata says it needs."""
    for extra, names in requirements().items():
        what = f"extra {extra}" if extra else "libraries"
        if not (missing := [name for name in names if _version(name) is None]):
            yield Diagnosis("ok", what, ", ".join(map(_with_version, names)))
            continue
        install = f"'{DISTRIBUTION}[{extra}]', if you want it" if extra else " ".join(missing)
        fix = f"{sys.executable} -m pip install {install}"
        yield Diagnosis("note" if extra else "problem", what, f"missing: {', '.join(missing)}", fix)


def _with_version(name: str) -> str:
    """A distribution and its version, beside the one that Tandem is tested with where that is another."""
    version, tested = _version(name) or "", clone.tested().get(name.lower())
    other = f" (tested with {tested})" if tested and version.partition("+")[0] != tested else ""
    return f"{name} {version}{other}"


def requirements() -> dict[str, list[str]]:
    """Distributions needed by each extra; under the empty name, those always needed."""
    needed: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        assert name is not None
        needed.setdefault(extra[1] if extra else "", []).append(name[0])
    needed.pop("dev", None)
    needed.pop("docs", None)
    return needed


def _memory() -> Iterator[Diagnosis]:
    here, gpu = machine.host(), machine.accelerator()
    detail = f"{machine.readable(here.free)} free of {machine.readable(here.total)}, {machine.cores()} cores"
    fix = "close other programs; a 135M model in bfloat16 wants about 3 GB" if here.free < _LITTLE_MEMORY else ""
    yield _judged("memory", detail, fix)
    free = f"{gpu.name}, {machine.readable(gpu.free)} free of {machine.readable(gpu.total)}" if gpu else ""
    yield Diagnosis("ok", "accelerator", free or "none: the CPU trains")


def _vllm() -> Diagnosis:
    """vLLM, in this environment or in the one beside it, imported by the interpreter that would run it."""
    here = importlib.util.find_spec("vllm") is not None
    if not here and not ENGINE_PYTHON.exists():
        fix = "if you want engine: vllm, make it an environment of its own and name its interpreter as engine.python"
        return Diagnosis("note", "vLLM", f"neither in this environment nor in {ENGINE_PYTHON}", fix)
    python = sys.executable if here else str(ENGINE_PYTHON)
    done = subprocess.run([python, "-c", _IMPORT], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Diagnosis("problem", "vLLM", error, f"mend what {python} has, or name another as engine.python")
    return Diagnosis("ok", "vLLM", f"{done.stdout.strip().splitlines()[-1]}, by {python}")


def _version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
