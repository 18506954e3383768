"""Ranks on a Ray cluster: processes in a placement group that get the variables which torchrun would set.

Ray places them and watches over them; what they say to one another is theirs, as under every other launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandem.distributed.placement import Placement
from tandem.errors import ConfigError, DoesNotFit, RankError
from tandem.ports import free_port

PLACED_SECONDS = 300.0
"""How long the cluster may take to have room for every rank; an autoscaler starts hosts meanwhile."""
ENDED_SECONDS = 30.0
"""How long the others may take to end once one rank has failed."""


class Room(NamedTuple):
    """Where Ray has placed one rank."""

    host: str
    """Address of its host, by which others reach it."""
    devices: tuple[str, ...]
    """The accelerators that it was given there, as CUDA_VISIBLE_DEVICES names them."""
    port: int = 0
    """A port of its host at which nothing listens."""


class RankProcess:
    """One rank's process, started and watched by a Ray actor on its host."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def room(self) -> Room:
        """Where this actor is."""
        ray = _ray()
        devices = tuple(map(str, ray.get_gpu_ids()))
        return Room(host=ray.util.get_node_ip_address(), devices=devices, port=free_port(""))

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
        """Run ``python -m tandem`` to its end; returns its exit code."""
        command = [sys.executable, "-m", "tandem", *arguments]
        self._process = subprocess.Popen(command, env={**os.environ, **environ}, cwd=folder)
        return self._process.wait()

    def send(self, number: int) -> None:
        """Send the process a signal, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def launch(arguments: Sequence[str], ranks: int | None) -> None:
    """Run a command line of ``tandem`` on every rank until all have ended well; Ctrl-C is the lead's, which saves.

    Args:
        arguments: such as train and a recipe; the recipe must be at the same path on every host.
        ranks: how many; None: one for each GPU of the cluster.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no GPU and nothing says how many ranks there are.
        DoesNotFit: the cluster has no room for so many.
        RankError: a rank failed.
    """
    ray = _ray()
    ray.init(ignore_reinit_error=True)
    try:
        _run(ray, arguments, ranks)
    finally:
        ray.shutdown()


def _run(ray: Any, arguments: Sequence[str], ranks: int | None) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0))
    if (world := ranks or gpus) == 0:
        raise ConfigError("ranks: the Ray cluster has no GPU, so that their number is not known; set ranks")
    resources = {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
    group = placement_group([resources] * world, strategy="PACK")
    try:
        if not group.wait(PLACED_SECONDS):
            raise DoesNotFit(f"ranks: {world} of {resources} each do not fit the Ray cluster, which has {cluster}")
        actor = ray.remote(max_concurrency=2)(RankProcess)
        actors = [
            actor.options(
                num_cpus=1,
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in range(world)
        ]
        rooms = ray.get([actor.room.remote() for actor in actors])
        order = by_host(rooms)
        environs = environments([rooms[index] for index in order], rooms[order[0]].port)
        ended = {
            actors[index].run.remote(list(arguments), environ, os.getcwd()): rank
            for rank, (index, environ) in enumerate(zip(order, environs, strict=True))
        }
        _watch(ray, ended, [actors[index] for index in order])
    finally:
        remove_placement_group(group)


def _watch(ray: Any, ended: Mapping[Any, int], actors: Sequence[Any]) -> None:
    """Wait for every rank; one that fails ends the others."""
    left = list(ended)
    while left:
        try:
            done, left = ray.wait(left, num_returns=1)
        except KeyboardInterrupt:
            actors[0].send.remote(signal.SIGINT)
            continue
        try:
            code: int | str = ray.get(done[0])
        except ray.exceptions.RayError as error:
            code = f"an error of Ray's: {error}"
        if code != 0:
            for actor in actors:
                actor.send.remote(signal.SIGTERM)
            if left:
                ray.wait(left, num_returns=len(left), timeout=ENDED_SECONDS)
            raise RankError(f"rank {ended[done[0]]} of {len(actors)} on Ray ended with {code}; its output is above")


def by_host(rooms: Sequence[Room]) -> list[int]:
    """Indices of rooms such that those of one host follow one another, hosts in the order in which they first occur."""
    hosts = list(dict.fromkeys(room.host for room in rooms))
    return sorted(range(len(rooms)), key=lambda index: hosts.index(rooms[index].host))


def environments(rooms: Sequence[Room], port: int) -> list[dict[str, str]]:
    """The variables of every rank, in the order of ranks.

    Ray shows a process its own accelerator alone; a rank sees all that its host has for the run, its own by LOCAL_RANK,
    since it and its neighbours open one another's memory.
    """
    environs = []
    for rank, room in enumerate(rooms):
        ranks_here = [other for other, neighbour in enumerate(rooms) if neighbour.host == room.host]
        placement = Placement(
            rank=rank,
            world_size=len(rooms),
            local_rank=ranks_here.index(rank),
            local_world_size=len(ranks_here),
            master_addr=rooms[0].host,
            master_port=port,
            launcher="ray",
        )
        devices = [device for other in ranks_here for device in rooms[other].devices]
        environs.append(placement.environment() | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}))
    return environs


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--launcher ray needs Ray: pip install 'tandem-rl[ray]', on every host") from error
    return ray
