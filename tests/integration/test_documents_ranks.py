"""Every example for several GPUs of the documents trains four steps on two ranks, is killed meanwhile, and goes on.

They are as written but for model, data, the number of GPUs and what a processor needs; their engine is a real vLLM: one
or two at urls, which serve one example after the other, one that the run starts on a GPU of its own, or one beside each
rank. One example of each layout is in the default tier.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration import vllm_runs as vllm
from integration.test_documents import ROWS
from support.compat_cases import axolotl_files, examples, forget_swift, swift_files
from support.documents import build_brief_model
from support.processes import start
from support.tiers import long_but

from tandem.cli import app as cli
from tandem.ports import free_port

pytestmark = [pytest.mark.slow, vllm.needs_engine]

STEPS = 4
COMMON = (f"steps={STEPS}", "name=run", "threads=1", "checkpoint.every=1", "loggers=[]", f"dtype={vllm.DTYPE}")
OWN = [f"engine.{name}={json.dumps(value)}" for name, value in vllm.engine().items() if name != "kind"]
"""What an engine of a test needs, where the run starts it."""
SOURCE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE / 'tests'}", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Layout:
    """What an example comes to on two ranks."""

    engine: str
    """urls: those of the examples' server or servers; apart: on a GPU of its own; beside: one on each rank's."""
    shard: str = "states"
    """What ranks share."""
    sync: str = "broadcast"
    """How weights reach the engine."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Beside NPROC_PER_NODE."""
    gpus: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the line that count GPUs, as they are here."""


URLS, CUT, BESIDE = Layout("urls"), Layout("urls", shard="weights"), Layout("beside", sync="shared")
COUNTED = Layout("beside", sync="shared", gpus={"num_infer_workers": "2"}, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
SLICED = Layout("beside", sync="shared", gpus={"vllm_tensor_parallel_size": "2"})
THREE = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
SWIFT = {
    "code": URLS,
    "its adapter": CUT,
    "a server of an older release": CUT,
    "several nodes": URLS,
    "a mixture of experts beside a server": URLS,
    "a server": CUT,
    "a server and what it ignores": CUT,
    "countdown": CUT,
    "two updates": CUT,
    "async": Layout("apart", environ=THREE),
    "vLLM on the other GPU": Layout("apart", environ=THREE),
    "colocated with all": COUNTED,
    "DAPO": COUNTED,
    "GSPO": BESIDE,
    "SAPO": BESIDE,
    "a mixture of experts": SLICED,
    "vLLM over four GPUs": SLICED,
}
"""ms-swift's examples for several GPUs, adapters before whole weights: an engine that has another's base is refused."""

FSDP = {
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
ZERO3 = {"deepspeed": "deepspeed_configs/zero3_bf16.json", "gradient_checkpointing_kwargs": {"use_reentrant": True}}
AXOLOTL: dict[str, tuple[str, Mapping[str, Any], Layout]] = {
    "FSDP": ("quick start", FSDP, Layout("adapters", shard="weights", sync="hotswap")),
    "ZeRO-3": ("quick start", ZERO3, Layout("adapters", shard="weights", sync="hotswap")),
    "FSDP, asynchronous": ("full async", FSDP, Layout("adapters", shard="weights", sync="hotswap")),
    "FSDP, whole weights": ("a server", FSDP, CUT),
    "two GPUs train": ("two GPUs for vLLM", {}, URLS),
    "two GPUs, colocated": ("colocate", {}, BESIDE),
}
"""Axolotl's, each a whole file and the keys that its section on scaling adds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the examples name."""
    place = tmp_path_factory.mktemp("documents")
    build_brief_model(place / "brief", vllm.HEAD_DIM)
    (place / "Qwen").mkdir()
    for size in ("1.5B-Instruct", "7B"):
        (place / f"Qwen/Qwen2.5-{size}").symlink_to(place / "brief")
    axolotl_files(place)
    swift_files(place)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return place


class Servers:
    """Engines that the examples find at urls, each started where it is first needed."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self._place, self._stack, self._ports = place, stack, dict[str, int]()

    def port(self, name: str) -> int:
        """That of the first or second engine for whole weights, or of the one that takes ``adapters``."""
        if name not in self._ports:
            port = self._ports[name] = free_port()
            words = ["swift", "deploy", "--model", "brief", "--torch_dtype", vllm.DTYPE]
            words += ["--vllm_max_num_seqs", "64", "--port", str(port)]
            if name == "adapters":
                (self._place / "served.yaml").write_text(axolotl_options("quick start", {}, port))
                words = ["serve", "engine", "served.yaml", f"dtype={vllm.DTYPE}", f"runs={self._place / 'runs'}"]
            self._stack.enter_context(self._started(name, [*words, *OWN]))
        return self._ports[name]

    @contextmanager
    def _started(self, name: str, words: Sequence[str]) -> Iterator[None]:
        log = self._place / f"{name}.txt"
        process = start(words, cwd=self._place, out=log, environment=ENVIRONMENT)

        def up() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ctrl-C ends it" in log.read_text()

        try:
            vllm.until(up, "the start of the engine", 240)
            yield
            assert process.poll() is None, "a trainer does not end an engine that it did not start"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def servers(place: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(place, stack)


def axolotl_options(block: str, more: Mapping[str, Any], port: int) -> str:
    """An Axolotl file of the documents, with its section on scaling, for an engine at a port."""
    file = {**examples("axolotl")[block]["file"], **more}
    file["vllm"] = {**file.get("vllm", {}), "port": port}
    if file["trl"].get("vllm_mode") != "colocate":
        file["trl"] = {**file["trl"], "vllm_server_port": port}
    return yaml.safe_dump(file, sort_keys=False)


@pytest.mark.parametrize("what", long_but(SWIFT, "a server of an older release", "several nodes"))
def test_ms_swifts_examples_train_on_two_ranks(what: str, place: Path, servers: Servers) -> None:
    layout, line = SWIFT[what], examples("swift")[what]["line"]
    for name, count in layout.gpus.items():
        line = re.sub(rf"--{name} \d+", f"--{name} {count}", line)
    if layout.engine == "urls":
        ports = [str(servers.port(name)) for name in (["one", "two"] if "--vllm_server_host a b" in line else ["one"])]
        hosts = ["127.0.0.1"] * len(ports)
        line = re.sub(r"--vllm_server_(host|port) [^-]+", "", line)
        line = " ".join([line, "--vllm_server_host", *hosts, "--vllm_server_port", *ports])
    environ = {"NPROC_PER_NODE": "2", **layout.environ}
    trains_and_goes_on(place, what, layout, ["swift", "rlhf", *shlex.split(line)], environ)


@pytest.mark.parametrize("what", long_but(AXOLOTL, "FSDP"))
def test_axolotls_examples_train_on_two_ranks(what: str, place: Path, servers: Servers) -> None:
    """``CUDA_VISIBLE_DEVICES=0,1 axolotl train`` beside ``axolotl vllm-serve``."""
    block, more, layout = AXOLOTL[what]
    served = {"adapters": "adapters", "urls": "one"}.get(layout.engine)
    file = place / f"{block}-{len(more)}.yaml"
    file.write_text(axolotl_options(block, more, servers.port(served) if served else 1))
    trains_and_goes_on(place, what, layout, ["train", str(file)], {"CUDA_VISIBLE_DEVICES": "0,1"})


def trains_and_goes_on(
    place: Path, what: str, layout: Layout, words: Sequence[str], environ: Mapping[str, str]
) -> None:
    """What ``--show`` prints passes ``check``; its run is killed after a step, goes on, and proves every publish."""
    folder = place / "runs" / re.sub(r"\W", "-", what)
    more = [*COMMON, f"runs={folder}", *(OWN if layout.engine in ("apart", "beside") else ())]
    recipe = shown(place, layout, [*words, *more], environ)
    run, log = folder / "run", place / f"{folder.name}.txt"
    process = start([*words, *more], cwd=place, out=log, environment=ENVIRONMENT | environ)

    def trained() -> bool:
        assert process.poll() is None, log.read_text()
        return bool(list(run.glob("checkpoints/00000[1-9]")))

    try:
        vllm.until(trained, "a step", 240)
    finally:
        process.kill()
        process.wait()
    killed = len(vllm.lines(run / "metrics.jsonl"))
    assert 1 <= killed < STEPS
    ended(place, ["train", str(run)], environ)
    assert list(vllm.metrics(run)) == list(range(1, STEPS + 1))
    vllm.groups_once(run, each=recipe["groups_per_step"])
    publishes = vllm.published(run)
    assert publishes[STEPS]["probe_gap"] is not None
    assert all(event["probe_gap"] is not None for event in publishes.values())
    engines = len(list((run / "logs").glob("engine-*.log")))
    assert engines == {"apart": 1, "beside": 2}.get(layout.engine, 0)


def shown(place: Path, layout: Layout, words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The recipe that ``--show`` prints, which is of the layout; ``tandem check`` finds nothing wrong with it."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        forget_swift(patch)
        for name, value in environ.items():
            patch.setenv(name, value)
        assert code_of(*words, "--show") == 0
        (place / "shown.yaml").write_text(printed.getvalue())
        assert code_of("check", "shown.yaml") == 0, printed.getvalue()
    recipe: dict[str, Any] = yaml.safe_load((place / "shown.yaml").read_text())
    assert (recipe["ranks"], recipe["distributed"]["shard"]) == (2, layout.shard)
    assert recipe.get("sync", {}).get("kind", "shared") == layout.sync
    return recipe


def code_of(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    return stopped.value.code or 0


def ended(place: Path, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command prints, which ends well."""
    log = place / "ended.txt"
    log.unlink(missing_ok=True)
    process = start(words, cwd=place, out=log, environment=ENVIRONMENT | environ)
    try:
        vllm.until(lambda: process.poll() is not None, f"the end of {words[0]}", 280)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text()
    return log.read_text()
