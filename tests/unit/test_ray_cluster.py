"""Ranks on a Ray cluster: their order and variables, and what becomes of one that fails; Ray itself is a stand-in."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tandem.distributed import ray_cluster
from tandem.distributed.placement import Placement
from tandem.distributed.ray_cluster import Room, by_host, environments
from tandem.errors import ConfigError, DoesNotFit, RankError

HOSTS = [
    Room(host="10.0.0.2", devices=("3",)),
    Room(host="10.0.0.1", devices=("0",)),
    Room(host="10.0.0.2", devices=("1",)),
]


def test_ranks_of_a_host_follow_one_another() -> None:
    assert by_host(HOSTS) == [0, 2, 1]


def test_every_rank_gets_torchruns_variables_and_its_hosts_accelerators() -> None:
    environs = environments([HOSTS[index] for index in by_host(HOSTS)], 29500)
    placements = [Placement.from_environment(environ) for environ in environs]
    assert [(p.rank, p.local_rank, p.local_world_size, p.launcher) for p in placements if p] == [
        (0, 0, 2, "ray"), (1, 1, 2, "ray"), (2, 0, 1, "ray"),
    ]  # fmt: skip
    assert {(p.master_addr, p.master_port, p.world_size) for p in placements if p} == {("10.0.0.2", 29500, 3)}
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environs] == ["3,1", "3,1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in environments([Room(host="h", devices=())], 1)[0]


class FakeRay(types.ModuleType):
    """As much of Ray as the launcher uses, in threads of this process."""

    def __init__(self, resources: dict[str, float], codes: list[int]) -> None:
        super().__init__("ray")
        self.resources, self.codes = resources, codes
        self.bundles: list[dict[str, float]] = []
        self.removed = self.down = False
        self.started: list[dict[str, str]] = []
        self.signals: list[int] = []
        self.stopped = threading.Event()
        self.pool = ThreadPoolExecutor(8)
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError)

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None:
        self.down = True

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda cls: types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=lambda: FakeActor(self, options))
        )

    def get(self, futures: Any) -> Any:
        return [one.result() for one in futures] if isinstance(futures, list) else futures.result()

    def wait(self, futures: list[Future[Any]], *, num_returns: int, timeout: float | None = None) -> Any:
        wait(futures, timeout, "FIRST_COMPLETED" if num_returns == 1 else "ALL_COMPLETED")
        done = [one for one in futures if one.done()][:num_returns]
        return done, [one for one in futures if one not in done]


class FakeActor:
    def __init__(self, ray: FakeRay, options: dict[str, Any]) -> None:
        self.number = options["scheduling_strategy"]
        for name in ("room", "free_port", "run", "send"):
            method = getattr(self, f"_{name}")
            call = types.SimpleNamespace(remote=lambda *args, method=method: ray.pool.submit(method, *args))
            setattr(self, name, call)
        self.ray = ray

    def _room(self) -> Room:
        return HOSTS[self.number]

    def _free_port(self) -> int:
        return 29500

    def _run(self, arguments: list[str], environ: dict[str, str], folder: str) -> int:
        self.ray.started.append(environ)
        code = self.ray.codes[int(environ["RANK"])]
        return code if code >= 0 else (self.ray.stopped.wait(30), 0)[1]

    def _send(self, number: int) -> None:
        self.ray.signals.append(number)
        self.ray.stopped.set()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeRay]]:
    made: list[FakeRay] = []

    def make(resources: dict[str, float], codes: list[int], fits: bool = True) -> FakeRay:
        fake = FakeRay(resources, codes)
        made.append(fake)

        def placement_group(bundles: list[dict[str, float]], **_: Any) -> Any:
            fake.bundles = bundles
            return types.SimpleNamespace(wait=lambda seconds: fits)

        groups = types.SimpleNamespace(
            placement_group=placement_group, remove_placement_group=lambda group: setattr(fake, "removed", True)
        )
        strategies = types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: placement_group_bundle_index
        )
        modules = {"": fake, ".util": fake, ".util.placement_group": groups, ".util.scheduling_strategies": strategies}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"ray{name}", module)  # type: ignore[arg-type]
        return fake

    yield make
    for fake in made:
        fake.stopped.set()
        fake.pool.shutdown()


def test_every_gpu_of_the_cluster_is_a_rank(ray: Callable[..., FakeRay]) -> None:
    fake = ray({"GPU": 3.0, "CPU": 8.0}, [0, 0, 0])
    ray_cluster.launch(["train", "r.yaml"], None)
    assert fake.bundles == [{"GPU": 1.0, "CPU": 1.0}] * 3
    assert sorted(environ["RANK"] for environ in fake.started) == ["0", "1", "2"]
    assert fake.removed
    assert fake.down
    assert not fake.signals


def test_a_rank_that_fails_ends_the_others(ray: Callable[..., FakeRay]) -> None:
    fake = ray({"CPU": 8.0}, [-1, 7, -1])
    with pytest.raises(RankError, match="rank 1 of 3 on Ray ended with 7"):
        ray_cluster.launch(["train", "r.yaml"], 3)
    assert fake.bundles == [{"CPU": 1.0}] * 3
    fake.pool.shutdown()  # what was sent has arrived
    assert len(fake.signals) == 3
    assert fake.removed


def test_a_cluster_without_room_or_gpus(ray: Callable[..., FakeRay]) -> None:
    fake = ray({"GPU": 2.0}, [], fits=False)
    with pytest.raises(DoesNotFit, match=r"ranks: 4 of .* do not fit the Ray cluster"):
        ray_cluster.launch(["train", "r.yaml"], 4)
    assert fake.removed
    ray({"CPU": 2.0}, [])
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        ray_cluster.launch(["train", "r.yaml"], None)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'tandem-rl\[ray\]'"):
        ray_cluster.launch(["train", "r.yaml"], 2)
