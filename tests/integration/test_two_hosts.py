"""An engine on another host: two network namespaces, each with a loopback of its own and a wire between them.

What one side takes for 127.0.0.1 is not there for the other, so an address that only one host knows fails here as it
does between machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import CUDA, HEAD_DIM, SLOW, engine, metrics, needs_engine, published, recipe, until
from kills_ranks import wide_model
from support.tiers import long_but

pytestmark = [
    needs_engine,
    pytest.mark.slow,
    pytest.mark.skipif(CUDA, reason="NCCL between namespaces of one host needs a card for each"),
]

TRAINER, ENGINE = "10.213.7.1", "10.213.7.2"
PORT = 8000


@dataclass
class Hosts:
    """Two namespaces, each held open by a process that sleeps."""

    trainer: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]

    def run(self, host: subprocess.Popen[bytes], *command: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(_inside(host, *command), check=True, capture_output=True, timeout=60)


def _inside(host: subprocess.Popen[bytes], *command: str) -> list[str]:
    return ["nsenter", "--net", "--target", str(host.pid), *command]


def _host() -> subprocess.Popen[bytes]:
    """A namespace of its own; skipped where none may be made."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("network namespaces need unshare, nsenter and ip (util-linux, iproute2)")
    held = subprocess.Popen(["unshare", "--net", "sleep", "3600"], stderr=subprocess.PIPE)
    own = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + 20
    while held.poll() is None and time.monotonic() < deadline:
        try:
            if Path(f"/proc/{held.pid}/ns/net").readlink() != own:
                return held
        except OSError:  # it ended in this moment
            break
        time.sleep(0.02)
    held.kill()
    pytest.skip(f"no network namespaces here: {held.communicate()[1].decode().strip()}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = [_host()]
    try:
        made.append(_host())
        pair = Hosts(*made)
        try:
            wire = ("ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1", "netns", str(made[1].pid))
            pair.run(pair.trainer, *wire)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no wire between network namespaces here: {error.stderr.decode().strip()}")
        for host, name, address in ((pair.trainer, "wire0", TRAINER), (pair.engine, "wire1", ENGINE)):
            pair.run(host, "ip", "address", "add", f"{address}/30", "dev", name)
            for each in (name, "lo"):
                pair.run(host, "ip", "link", "set", each, "up")
        yield pair
    finally:
        for host in made:
            host.kill()
            host.communicate()


def _start(
    host: subprocess.Popen[bytes], place: Path, log_name: str, *command: str, **variables: str
) -> subprocess.Popen[bytes]:
    with (place / log_name).open("wb") as out:
        whole = _inside(host, sys.executable, "-m", "tandem", *command)
        return subprocess.Popen(whole, cwd=place, stdout=out, stderr=out, env={**os.environ, **variables})


def _end(*processes: subprocess.Popen[bytes] | None) -> None:
    for process in processes:
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


FULL, LORA = {"trainable": {"kind": "full"}}, {"trainable": {"kind": "lora", "rank": 8}}
HERE: dict[str, dict[str, Any]] = {
    "weights": FULL,
    "adapter": LORA,
    "weights of two ranks": {**FULL, "ranks": 2},
    "cut weights of two ranks": {**FULL, "ranks": 2, "distributed": {"shard": "weights"}},
    "adapter of two ranks": {**LORA, "ranks": 2},
}


@pytest.mark.parametrize("what", long_but(HERE, "weights"))
def test_an_engine_on_another_host_is_trained(hosts: Hosts, tmp_path: Path, what: str) -> None:
    """Served there, named by its address here, and nothing said of the trainer's own."""
    model, options = wide_model(tmp_path, head_dim=HEAD_DIM), {"sync": "broadcast", "steps": 2, **HERE[what]}
    served = {"trainable": options["trainable"], "sync": "broadcast", "rewards": {"number": 1.0}}
    there = recipe(model, tmp_path / "there", engine=engine(host=ENGINE, port=PORT), **served)
    urls = {"kind": "vllm", "urls": [f"http://{ENGINE}:{PORT}"], "start_seconds": 240.0}
    here = recipe(model, tmp_path / "runs", engine=urls, rewards={"marks:letters": 1.0}, **options)
    (tmp_path / "marks.py").write_text(SLOW)
    for name, recipe_ in (("there", there), ("here", here)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe_))
    server = _start(hosts.engine, tmp_path, "served.txt", "serve", "engine", "there.yaml")
    trainer = None
    try:

        def up() -> bool:
            assert server.poll() is None, (tmp_path / "served.txt").read_text()
            return "Ctrl-C ends it" in (tmp_path / "served.txt").read_text()

        until(up, "the start of the engine", 240)
        trainer = _start(hosts.trainer, tmp_path, "said.txt", "train", "here.yaml")
        assert trainer.wait(240) == 0, (tmp_path / "said.txt").read_text()
        folder = tmp_path / "runs" / "run"
        assert list(metrics(folder)) == [1, 2]
        assert all(event["probe_gap"] is not None for event in published(folder).values())
        meeting = json.loads((folder / "nccl_bridge_config.json").read_text())["nccl_init_method"]
        assert meeting.startswith(f"tcp://{TRAINER}:")
    finally:
        _end(trainer, server)


@pytest.mark.long
@pytest.mark.parametrize("trainable", [FULL, LORA], ids=["weights", "adapter"])
def test_ranks_on_two_hosts_each_start_their_engine(hosts: Hosts, tmp_path: Path, trainable: dict[str, Any]) -> None:
    """As srun starts them; the second host's engine is killed once, and its rank starts it again."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    options = recipe(model, tmp_path / "runs", steps=6, rewards={"marks:letters": 1.0}, **trainable)
    (tmp_path / "marks.py").write_text(SLOW)
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(options))
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": TRAINER}
    ranks = [
        _start(host, tmp_path, f"rank-{rank}.txt", "train", "pairs.yaml", **place, RANK=str(rank), MASTER_PORT="29511")
        for rank, host in enumerate((hosts.trainer, hosts.engine))
    ]
    folder = tmp_path / "runs" / "run"

    def output() -> str:
        return "".join((tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2))

    def engine_of_second() -> dict[str, Any]:
        return dict(json.loads((folder / "engine-1.json").read_text()))

    def trained(steps: int) -> bool:
        assert all(rank.poll() is None for rank in ranks), output()
        return len(published(folder)) > steps

    try:
        until(lambda: trained(1), "two publishes", 240)
        first = engine_of_second()
        assert first["url"].startswith(f"http://{ENGINE}:")
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: engine_of_second()["pid"] != first["pid"], "another engine of rank 1", 120)
        assert [rank.wait(240) for rank in ranks] == [0, 0], output()
        assert list(metrics(folder)) == [1, 2, 3, 4, 5, 6]
        assert all(event["probe_gap"] is not None for event in published(folder).values())
        assert not (folder / "engine-1.json").exists(), "it ended with the run"
    finally:
        _end(*ranks)
