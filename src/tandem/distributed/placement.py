"""Place of a process among the trainer's ranks, by its launcher's environment variables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.errors import ConfigError

LAUNCHER = "TANDEM_LAUNCHER"
"""Variable in which Tandem's own launchers say which they are; others have theirs."""
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Numbers that torchrun gives a process."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Where the processes meet: the host of rank 0, and a port of it."""
VARIABLES = (*NUMBERS, *MEETING)
"""What torchrun, accelerate, Kubeflow's trainer and Ray Train set in the environment of every process."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_SLURM_PORTS = range(12_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (32,768 and above)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One process's place among the ranks of a run; fields of ``VARIABLES`` have their names.

    Example:
        >>> started = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8",
        ...            "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
        >>> placement = Placement.from_environment(started)
        >>> placement.rank, placement.launcher, placement.is_lead
        (9, 'torchrun', False)
    """

    rank: int
    """Number of this process in the run, from 0; rank 0 leads."""
    world_size: int
    """Processes of the run."""
    local_rank: int
    """Number of this process on its host, from 0: that of its accelerator."""
    local_world_size: int
    """Processes of the run on this host."""
    master_addr: str
    """Host of rank 0."""
    master_port: int
    """Port of that host at which the ranks meet."""
    launcher: str
    """What started the process: tandem, ray, torchrun, slurm, or environment where the variables do not say."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that contradict one another."""
        if (
            0 <= self.local_rank <= self.rank < self.world_size
            and self.local_rank < self.local_world_size <= self.world_size
        ):
            return
        raise ConfigError(
            f"the variables of {self.launcher} contradict one another ({self.environment()}): expected 0 <= LOCAL_RANK "
            "<= RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE"
        )

    @property
    def has_several_hosts(self) -> bool:
        """Whether some ranks are on another host."""
        return self.local_world_size < self.world_size

    @property
    def is_lead(self) -> bool:
        """Whether this process runs the loop; the others execute its commands."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Placement | None:
        """The place that a launcher gave this process; None if none did.

        torchrun's variables come before SLURM's, since ``srun torchrun`` has both. A single task of SLURM is nobody's
        rank: it may start ranks of its own.

        Raises:
            ConfigError: some variables are missing, no numbers, or contradict one another.
        """
        numbered = {name: environ[name] for name in NUMBERS if environ.get(name, "") != ""}
        if not numbered or (_is_alone(numbered) and len(numbered) < len(NUMBERS)):
            if (task := _slurm_task(environ)) is None:
                return None
            environ = task
        _require(environ, VARIABLES, "a launcher such as torchrun")
        started_by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"
        return cls(
            **{name.lower(): _number(environ, name) for name in (*NUMBERS, "MASTER_PORT")},
            master_addr=environ["MASTER_ADDR"],
            launcher=environ.get(LAUNCHER) or started_by,
        )

    def check_ranks(self, ranks: int | Literal["auto"] | None) -> None:
        """Check the recipe's number of ranks against the launcher's; None is a recipe that does not say.

        Raises:
            ConfigError: they disagree.
        """
        if ranks not in (None, "auto", self.world_size):
            raise ConfigError(
                f"the recipe has ranks: {ranks}, but {self.launcher} started {self.world_size} processes; leave ranks "
                f"out, set it to {self.world_size} or auto, or start {ranks}"
            )

    def environment(self) -> dict[str, str]:
        """The variables that give a process this place: what ``from_environment`` reads."""
        return {**{name: str(getattr(self, name.lower())) for name in VARIABLES}, LAUNCHER: self.launcher}


def first_host(nodelist: str) -> str:
    """The first host of a node list of SLURM.

    Example:
        >>> first_host("gpu[01-03,7],login1")
        'gpu01'
    """
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def visible_accelerators(environ: Mapping[str, str]) -> list[str]:
    """Accelerators of a process, as CUDA_VISIBLE_DEVICES names them, or else all of the machine's; without torch.

    CUDA reads the list up to the first entry that is no device: -1 hides all, or those after it.
    """
    if (devices := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        words = (word.strip() for word in devices.split(","))
        return list(itertools.takewhile(lambda word: word and not word.startswith("-"), words))
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def counts_hosts(environ: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE, as a cluster's platform has set them, number hosts: NNODES and NODE_RANK say so."""
    if environ.get("LOCAL_RANK") or environ.get("LOCAL_WORLD_SIZE"):
        return False
    pairs = (("WORLD_SIZE", "NNODES"), ("RANK", "NODE_RANK"))
    return all(environ.get(rank, "") == environ.get(host, "") != "" for rank, host in pairs)


def _is_alone(numbered: Mapping[str, str]) -> bool:
    """Whether the variables that are set describe a run of one process, as images and notebooks have them."""
    return "WORLD_SIZE" in numbered and all(_ALONE[name] == text.strip() for name, text in numbered.items())


def _require(environ: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Raise ConfigError unless all of these variables are set."""
    if missing := [name for name in names if environ.get(name, "") == ""]:
        there = ", ".join(f"{name}={environ[name]}" for name in names if name not in missing)
        raise ConfigError(
            f"the environment has {there}, but not {' and '.join(missing)}; {launcher} sets all of them. To train on "
            "one process unset those that are there"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]} is not a whole number; a launcher sets it to one") from None


def _slurm_task(environ: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a task of srun; a batch script is no task of a step and has no node list of one."""
    nodes, world_size = environ.get("SLURM_STEP_NODELIST", ""), environ.get("SLURM_NTASKS", "")
    if not nodes or world_size == "1":
        return None
    _require(environ, ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"), "srun")
    job = _number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(_slurm_tasks_here(environ, _number(environ, "SLURM_NTASKS"))),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_SLURM_PORTS[job % len(_SLURM_PORTS)]),
        LAUNCHER: "slurm",
    }


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this host, of a list such as ``8(x2),4`` for all hosts."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [int(count) for count, hosts in runs for _ in range(int(hosts or 1))]
    node = _number(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
    if sum(counts) != world_size or node >= len(counts):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={text} and SLURM_NODEID={node} do not fit SLURM_NTASKS={world_size}: expected "
            "tasks per host such as 8(x2), which add up to it; srun sets all three"
        )
    return counts[node]
