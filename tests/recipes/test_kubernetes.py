"""Kubernetes' manifests: what they have torchrun set is where each process stands among the ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import start

from tandem.distributed.placement import VARIABLES, Placement

MANIFESTS = Path(__file__).parents[2] / "recipes" / "kubernetes"
SAYS = """
import json, os, sys
from pathlib import Path
names = json.loads(sys.argv[1])
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps({name: os.environ.get(name) for name in names}))
"""
GPUS = "nvidia.com/gpu"


def manifest(name: str) -> Any:
    read = yaml.safe_load((MANIFESTS / name).read_text())
    assert isinstance(read, dict)
    return read


def jobset() -> tuple[list[str], list[dict[str, str]]]:
    """The command, and the variables of each pod."""
    (job,) = manifest("jobset.yaml")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["parallelism"] == spec["completions"]
    assert f"--nnodes={spec['completions']}" in container["command"]
    assert f"--nproc-per-node={container['resources']['limits'][GPUS]}" in container["command"]
    return container["command"], [{"JOB_COMPLETION_INDEX": str(pod)} for pod in range(spec["completions"])]


def trainjob() -> tuple[list[str], list[dict[str, str]]]:
    """The command, and the variables that the runtime sets in each pod."""
    trainer = manifest("trainjob.yaml")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"][GPUS]
    nodes = trainer["numNodes"]
    shared = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "tandem-node-0-0.tandem",
        "PET_MASTER_PORT": "29500",
    }
    return trainer["command"], [{**shared, "PET_NODE_RANK": str(node)} for node in range(nodes)]


@pytest.mark.slow
@pytest.mark.parametrize("read", [jobset, trainjob], ids=["jobset", "trainjob"])
def test_what_a_manifest_starts_are_the_ranks_of_one_run(read: Any, tmp_path: Path) -> None:
    """torchrun is run as the manifest says, every pod on this machine and with one process in place of eight."""
    command, pods = read()
    tail = ["-m", "tandem", "train", "/shared/recipe.yaml"]
    assert command[0] == "torchrun"
    assert command[-len(tail) :] == tail
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "says.py").write_text(SAYS)
    small = {"tandem-trainer-0-0.tandem": "127.0.0.1", "29500": port, "--nproc-per-node=8": "--nproc-per-node=1"}
    running = []
    for pod in pods:
        words = command[1 : -len(tail)]
        here = dict(pod)
        for name, value in {"$(JOB_COMPLETION_INDEX)": pod.get("JOB_COMPLETION_INDEX", ""), **small}.items():
            words = [word.replace(name, value) for word in words]
        if "PET_NNODES" in here:
            here |= {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        words += [str(tmp_path / "says.py"), json.dumps([*VARIABLES, "TORCHELASTIC_RUN_ID"]), str(tmp_path)]
        pod_process = start(
            words,
            cwd=tmp_path,
            out=tmp_path / "said.txt",
            environment=os.environ | here,
            module="torch.distributed.run",
        )
        running.append(pod_process)
    assert [process.wait(120) for process in running] == [0] * len(pods)
    placements = [
        Placement.from_environment(json.loads((tmp_path / str(rank)).read_text())) for rank in range(len(pods))
    ]
    assert [(p.rank, p.world_size, p.local_rank, p.launcher) for p in placements if p] == [
        (rank, len(pods), 0, "torchrun") for rank in range(len(pods))
    ]
    assert {(p.master_addr, p.master_port) for p in placements if p} == {("127.0.0.1", int(port))}
