"""``tandem doctor``: what this machine has and lacks, checked by trying it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import __version__, machine
from tandem.config.loading import load
from tandem.distributed import flight_recorder
from tandem.distributed.placement import Placement, visible_accelerators
from tandem.engines.base import EngineSpec
from tandem.errors import TandemError

DISTRIBUTION = "tandem-rl"
_LITTLE_DISK = 2e9
_LITTLE_MEMORY = 3e9
ENGINE_PYTHON = Path(".venv-engine/bin/python")
"""Where scripts/setup makes an environment for vLLM."""
_IMPORT = "import torch, vllm; print(f'vLLM {vllm.__version__}, torch {torch.__version__}')"
_IMPORT_SECONDS = 180
DEFAULT_PORT = 29_500
"""Where torchrun has ranks meet unless it is told another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing looked at."""

    what: str
    """Its name."""
    state: Literal["ok", "note", "problem"]
    """note: something optional is missing; problem: training cannot work."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do about it."""


def doctor(recipe: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Print every finding; returns the exit code, 1 if there is a problem.

    Args:
        recipe: whose engine and runs folder are looked at.
        overrides: laid over the recipe.

    Raises:
        ConfigError: the recipe is wrong.
    """
    config = load(recipe, overrides).config if recipe else None
    folder = Path("runs" if config is None else config.runs)
    diagnoses = [*findings(folder), _any_engine() if config is None else _recipe_engine(config.engine)]
    table = Table(box=None, show_header=False, pad_edge=False)
    colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in diagnoses:
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n→ {finding.fix}", "bold" if finding.state == "problem" else "")
        table.add_row(Text(finding.state, colours[finding.state]), finding.what, detail)
    console = Console()
    console.print(table)
    problems = sum(finding.state == "problem" for finding in diagnoses)
    console.print(f"{problems} problem{'s' * (problems != 1)}" if problems else "ready to train", markup=False)
    return 1 if problems else 0


def findings(folder: Path) -> Iterator[Diagnosis]:
    """Everything that is looked at, in order."""
    yield Diagnosis(what="tandem", state="ok", detail=f"{__version__}, Python {platform.python_version()}")
    yield from _packages()
    yield from _memory()
    yield from ranks(os.environ)
    yield from _traces(folder)
    yield _disk(folder)
    yield _tried("write access", lambda: _write(folder), f"make {folder} writable, or set runs: to a folder that is")
    yield _tried("grader process", _child, "allow child processes: rewards are computed in them")
    yield _tried("matrix product", _product, "reinstall torch for this machine: https://pytorch.org/get-started")
    yield _tried("parts", _parts, "reinstall tandem-rl, or mend the file that the message names")


def _packages() -> Iterator[Diagnosis]:
    """What the distribution's own metadata says it needs."""
    try:
        needed = requirements()
    except importlib.metadata.PackageNotFoundError:
        detail = f"{DISTRIBUTION} runs from its source, so what it needs cannot be looked up"
        yield Diagnosis(what="libraries", state="note", detail=detail, fix=f"{sys.executable} -m pip install -e .")
        return
    for extra, names in needed.items():
        missing = [name for name in names if _version(name) is None]
        what = f"extra {extra}" if extra else "libraries"
        if not missing:
            yield Diagnosis(what=what, state="ok", detail=", ".join(f"{name} {_version(name)}" for name in names))
        elif extra:
            fix = f"{sys.executable} -m pip install '{DISTRIBUTION}[{extra}]', if you want it"
            yield Diagnosis(what=what, state="note", detail=f"missing: {', '.join(missing)}", fix=fix)
        else:
            fix = f"{sys.executable} -m pip install {' '.join(missing)}"
            yield Diagnosis(what=what, state="problem", detail=f"missing: {', '.join(missing)}", fix=fix)


def requirements() -> dict[str, list[str]]:
    """Distributions needed by each extra; under the empty name, those always needed.

    Raises:
        PackageNotFoundError: Tandem is not installed.
    """
    needed: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        assert name is not None
        needed.setdefault(extra[1] if extra else "", []).append(name[0])
    needed.pop("dev", None)
    return needed


def _memory() -> Iterator[Diagnosis]:
    here, gpu = machine.host(), machine.accelerator()
    little = here.free < _LITTLE_MEMORY
    yield Diagnosis(
        what="memory",
        state="note" if little else "ok",
        detail=f"{machine.readable(here.free)} free of {machine.readable(here.total)}, {machine.cores()} cores",
        fix="close other programs; a 135M model in bfloat16 wants about 3 GB" if little else "",
    )
    if gpu is None:
        yield Diagnosis(what="accelerator", state="ok", detail="none: the CPU trains")
    else:
        free = f"{machine.readable(gpu.free)} free of {machine.readable(gpu.total)}"
        yield Diagnosis(what="accelerator", state="ok", detail=f"{gpu.name}, {free}")


def ranks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """What several ranks need, where there are several GPUs or a launcher has started several processes."""
    try:
        placement = Placement.from_environment(environ)
    except TandemError as error:
        yield Diagnosis(what="ranks", state="problem", detail=str(error), fix="docs/guide/distributed.md")
        return
    accelerators = len(visible_accelerators(environ))
    if placement is None and accelerators < 2:
        return
    if placement is not None:
        where = f"rank {placement.rank} of {placement.world_size}, started by {placement.launcher}"
        yield Diagnosis(what="ranks", state="ok", detail=f"{where}; they meet at {placement.master_addr}")
    if placement is not None and 0 < accelerators < placement.local_world_size:
        detail = f"{placement.local_world_size} of this host have {accelerators} GPUs"
        fix = "start as many as there are GPUs, or set distributed.share_gpus: true, which is slow"
        yield Diagnosis(what="ranks", state="note", detail=detail, fix=fix)
    if accelerators:
        yield _tried("NCCL", _nccl, "take a build of torch for this accelerator: https://pytorch.org/get-started")
    if placement is None or placement.launcher == "slurm":  # other launchers hold the port by now, or chose a free one
        yield _port(DEFAULT_PORT if placement is None else placement.master_port)


def _nccl() -> str:
    """What ranks on accelerators talk by."""
    import torch
    from torch import distributed

    if not torch.cuda.is_available() or not distributed.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} has none, or sees no accelerator")
    return f"{'.'.join(map(str, torch.cuda.nccl.version()))}, {torch.cuda.device_count()} GPUs"


def _port(port: int) -> Diagnosis:
    """Whether ranks can meet at a port of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            fix = "give the launcher another one (--master-port, MASTER_PORT); tandem train with ranks finds one itself"
            return Diagnosis(what="port", state="note", detail=f"{port}: {error.strerror}", fix=fix)
    return Diagnosis(what="port", state="ok", detail=f"{port} is free, where ranks meet")


def _traces(folder: Path) -> Iterator[Diagnosis]:
    """The last collectives of the latest run that has lost a rank, if any has."""
    if not (files := list(folder.glob(f"*/logs/{flight_recorder.NAME}*"))):
        return
    logs = max(files, key=lambda path: path.stat().st_mtime).parent
    ranks = ", ".join(path.name.removeprefix(flight_recorder.NAME) for path in flight_recorder.written(logs))
    detail = f"{logs.parent} has lost a rank; {logs} has the last collectives of rank {ranks}"
    fix = f"{flight_recorder.command(logs)} compares them; delete the files once they are read"
    yield Diagnosis(what="collectives", state="note", detail=detail, fix=fix)


def _disk(folder: Path) -> Diagnosis:
    free = machine.free_disk(folder)
    little = free < _LITTLE_DISK
    fix = "free some: a checkpoint holds weights, float32 masters and two moments (14 bytes a parameter)"
    return Diagnosis(
        what="disk",
        state="note" if little else "ok",
        detail=f"{machine.readable(free)} free for {folder}",
        fix=fix if little else "",
    )


def _tried(what: str, attempt: Callable[[], str], fix: str) -> Diagnosis:
    """Do something that training needs; any failure is the finding."""
    try:
        return Diagnosis(what=what, state="ok", detail=attempt())
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError, TandemError) as error:
        return Diagnosis(what=what, state="problem", detail=f"{type(error).__name__}: {error}", fix=fix)


def _any_engine() -> Diagnosis:
    """vLLM, where one might be: in this environment, or in the one beside it."""
    if importlib.util.find_spec("vllm") is not None:
        return _tried("vLLM", lambda: _vllm(sys.executable), "mend it, or name another engine.python")
    if ENGINE_PYTHON.exists():
        return _tried("vLLM", lambda: _vllm(str(ENGINE_PYTHON)), "make it anew: bash scripts/setup")
    fix = "if you want engine: vllm, make it an environment of its own and name its interpreter as engine.python"
    return Diagnosis(what="vLLM", state="note", detail=f"neither in this environment nor in {ENGINE_PYTHON}", fix=fix)


def _recipe_engine(engine: EngineSpec) -> Diagnosis:
    """vLLM, where a recipe's engine.python says."""
    from tandem.engines.vllm.spec import Vllm

    if not isinstance(engine, Vllm) or engine.urls:
        return Diagnosis(what="vLLM", state="ok", detail="the recipe starts none")
    python = engine.python or sys.executable
    if "/" in python and not Path(python).exists():
        where = "" if Path(python).is_absolute() else f"; relative paths start at {Path.cwd()}"
        fix = "name an interpreter that has vLLM as engine.python"
        if Path(python) == ENGINE_PYTHON:
            fix = "in Tandem's folder, bash scripts/setup engine makes it, with vLLM for CPUs; or " + fix
        return Diagnosis(what="vLLM", state="problem", detail=f"there is no {python}{where}", fix=fix)
    return _tried("vLLM", lambda: _vllm(python), f"let engine.python name an interpreter that has vLLM, not {python}")


def _vllm(python: str) -> str:
    """Import it in the interpreter that would run it."""
    done = subprocess.run([python, "-c", _IMPORT], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return f"{done.stdout.strip().splitlines()[-1]}, by {python}"


def _write(folder: Path) -> str:
    """Write where runs go, or would go."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"x")
    return f"{place} can be written"


def _child() -> str:
    """Start a child process and hear from it."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
    return f"a child process starts and ends in {time.perf_counter() - begin:.2f} s"


def _product() -> str:
    """A product of matrices in the type that weights have."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 512
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.ones(size, size, dtype=dtype, device=device)
        if not torch.equal(left @ left, torch.full_like(left, size)):
            raise RuntimeError(f"a product of {dtype} matrices is wrong on {device}")
        begin = time.perf_counter()
        for _ in range(4):
            left = (left @ left) / size
        left[0, 0].item()  # an accelerator has finished only now
        seconds[dtype] = time.perf_counter() - begin
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    return f"bfloat16 and float32 are right on {device}; bfloat16 runs at {ratio:.1f}× the speed of float32"


def _parts() -> str:
    """Import every part."""
    from tandem.config import registry as resolve

    count = [resolve.find(category, kind) for category in resolve.CATEGORIES for kind in resolve.names(category)]
    return f"all {len(count)} load"


def _version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
