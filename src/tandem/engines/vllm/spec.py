"""vLLM, the production engine: child processes of ours on its stock server, or servers that run elsewhere."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tandem.engines.base import (
    MOST_SECONDS,
    Engine,
    EngineRequirements,
    EngineSpec,
    ExportsSlices,
    ExportsWeights,
    LoadsVersions,
    ReceivesBroadcast,
    Relaunches,
    ReportsChecksums,
    TakesAdapter,
)
from tandem.engines.vllm.client import process as processes
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.client.fleet import Fleet, Launch
from tandem.engines.vllm.client.http import EngineServer
from tandem.engines.vllm.client.process import has_vllm
from tandem.engines.vllm.client.urls import UrlServer
from tandem.engines.vllm.server.admission import PROBES
from tandem.engines.vllm.speedups import AT_ONCE, FEW
from tandem.errors import ConfigError, bounded, check_bounds
from tandem.lazy import torch
from tandem.machine import cores
from tandem.ports import http_url, reserve_port
from tandem.processes import identity

if TYPE_CHECKING:
    from tandem.model.policy import Policy


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM has room for."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a Llama-like model."""
LOOPBACK = ("127.", "localhost", "::1")
"""How addresses begin that this machine alone can reach."""
PAUSES = 2
"""How many times as long as a control message an engine may stay paused."""
CPU_CACHE_GB = 1.0
"""KV cache on a CPU where kv_cache_gb does not say."""


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineSpec):
    """vLLM, started by us on this machine, or already running at ``urls`` (by: tandem serve engine RECIPE)."""

    has_grammars: ClassVar[bool] = True
    tells_experts: ClassVar[bool] = True
    most_rank: ClassVar[int | None] = RANKS[-1]
    capabilities: ClassVar[frozenset[type]] = frozenset(
        {ExportsWeights, ExportsSlices, TakesAdapter, LoadsVersions, Relaunches, ReceivesBroadcast, ReportsChecksums}
    )

    urls: tuple[str, ...] = ()
    """Engines that run already, such as [http://host:8000]; empty: they are started here."""
    python: str | None = None
    """Interpreter that has vLLM; null: the trainer's own. Two environments keep versions from fighting."""
    replicas: int = bounded(1, least=1)
    """Engines started here; requests go to the one with the shortest queue. With sync: shared the trainer's weights are
    the first one's, and a publish copies them into the others."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, such as ["1", "2,3"]; empty: what the trainer sees."""
    host: str = "127.0.0.1"
    """Address that started engines listen on."""
    port: int = bounded(0, most=65535)
    """Port of the first started engine, the next ones follow; 0 takes free ones."""
    gpu_memory_utilization: float = bounded(0.5, above=0, most=1)
    """Share of the accelerator that a started engine fills, weights included; the rest is the trainer's."""
    kv_cache_gb: float = bounded(0.0)
    """Room for keys and values in GB instead of what gpu_memory_utilization leaves; that share must be free at
    a start all the same. On a CPU 0 means 1."""
    max_model_len: int | None = bounded(None, least=1)
    """Most tokens of a prompt and its answer together; null: the recipe's context."""
    max_num_seqs: int | None = bounded(None, least=1)
    """Most answers sampled at once, beside a probe of new weights; null: two steps' answers, from 64 to 1024."""
    enforce_eager: bool = False
    """True does without CUDA graphs and compilation: a faster start, slower sampling."""
    enable_prefix_caching: bool | None = None
    """Keep the keys and values of prompts for the next request with the same beginning and the same weights; null: if
    this vLLM does so by itself for the model, which 0.26 does not for hybrids."""
    tensor_parallel_size: int = bounded(1, least=1)
    """Accelerators of one engine."""
    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    """Most images, videos and so on of one prompt, by kind."""
    args: dict[str, Any] = field(default_factory=dict)
    """Other options of vLLM's server by name, such as {attention_backend: FLASH_ATTN}; true gives a bare flag, false
    one that begins with no-."""
    sleep: Literal[0, 1, 2] = 0
    """Release the accelerator's memory while a step is trained: 1 keeps the weights in the host's memory, 2 keeps
    nothing, so that every publish brings them all. For a started engine on the trainer's own accelerator."""
    seeded: bool = False
    """Give every answer a random stream of its own, so that it can be sampled again; it costs speed on a GPU."""
    api_key_variable: str = ""
    """Environment variable with the engines' API key; without one, started engines get a random key."""
    require_api_key: bool = True
    """False starts engines without a key where api_key_variable names none, for environments that sample from them
    beside the trainer; whoever reaches host can then pause them and overwrite their weights, so it must be loopback."""
    start_seconds: float = bounded(900.0, above=0)
    """How long a start may take, and one at urls may not be there yet; the first on a machine compiles."""
    request_seconds: float = bounded(3600.0, above=0)
    """How long one answer may take."""
    control_seconds: float = bounded(300.0, above=0, most=MOST_SECONDS // PAUSES)
    """How long a control message, a publish included, may take."""
    restarts: int = bounded(3)
    """How often a started engine that died is started again, in one run."""
    linger_seconds: float = bounded(300.0)
    """How long a started engine outlives its trainer's death, for a resumed run to find it."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.require_api_key and not self.host.startswith(LOOPBACK):
            raise ValueError(f"require_api_key: false needs a host that this machine alone can reach, not {self.host}")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices names {len(self.devices)} sets of accelerators for {self.replicas} replicas")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} must begin with http:// or https://")
        urls = [url.rstrip("/") for url in self.urls]
        if twice := next((url for url in urls if urls.count(url) > 1), ""):
            raise ValueError(f"urls names {twice!r} twice; name each engine once")
        if taken := next(filter(is_taken, self.args), ""):
            raise ValueError(f"args: {taken} is set by Tandem or is an option of its own; remove it from args")

    def inert(self) -> Mapping[str, str]:
        """Options of starting an engine, where none is started."""
        if not self.urls:
            return {}
        reason = "urls names engines that run already, with options of their own"
        return {each.name: reason for each in fields(self) if each.name not in _OF_CLIENTS}

    def refuses(self, capability: type) -> str:
        """Why engines of these options cannot be used in some way; empty if they can."""
        if self.sleep and (reason := self._cannot_sleep(capability)):
            return reason
        if capability is ExportsWeights and self.tensor_parallel_size > 1:
            return (
                f"tensor_parallel_size is {self.tensor_parallel_size}, and one trainer process cannot train on slices: "
                f"use sync: broadcast, or ranks: {self.tensor_parallel_size} or a multiple of it with "
                "distributed.shard: weights"
            )
        if capability is Relaunches and self.urls:
            return "engines at urls were not started here, so they are not ours to end; use hotswap or broadcast"
        return ""

    def _cannot_sleep(self, capability: type) -> str:
        """Why ``sleep`` would gain nothing, or cannot be."""
        if capability is not ReceivesBroadcast:
            return (
                f"engine.sleep: {self.sleep} goes with sync: broadcast alone: other ways need the memory that it would "
                "release, or an engine that answers while a step is trained"
            )
        first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
        if self.devices and not any(first in each.split(",") for each in self.devices):
            return f"engine.sleep: {self.sleep} releases nothing that the trainer could use: devices are others"
        if not torch.cuda.is_available():
            return f"engine.sleep: {self.sleep} needs an accelerator: vLLM on a CPU has no sleep mode"
        return ""

    def check(self, *, folder: Path) -> str:
        """See that an engine can be started here for this run, or say that it is not ours to start.

        Raises:
            ConfigError: the key's variable is not set, the interpreter has no vLLM, or the
                folder's name cannot be told it.
        """
        self._key()
        if self.urls:
            return (
                f"expected at {', '.join(self.urls)}; whether it runs is seen when a run starts, and a stock vLLM "
                "there is proven by a probe alone"
            )
        _separable(folder)
        has_vllm(self.python)
        return f"vLLM, by {self.python or sys.executable}"

    @asynccontextmanager
    async def open(
        self, policy: Policy, *, context: int, requirements: EngineRequirements | None = None
    ) -> AsyncIterator[Engine]:
        """Start the engines or find them, and check that they can do what the run requires."""
        assert requirements is not None, "its command line is made of them"
        launch = self._launch(requirements, context) if not self.urls else None
        fleet = self._fleet(launch, requirements, every=1 if requirements.hosts is None else self.replicas)
        longest = min(context, self.max_model_len or context)
        engine = VllmEngine(fleet, context=longest, ends=sorted(policy.end_tokens))
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    @property
    def pause_seconds(self) -> float:
        """How long an engine may stay paused, its proof included."""
        return PAUSES * self.control_seconds

    def serve(
        self, *, context: int, requirements: EngineRequirements, adapters: Path
    ) -> AbstractAsyncContextManager[Fleet]:
        """Start the engines for trainers elsewhere, which name them in ``urls``; they end with the block.

        Args:
            context: most tokens of a prompt and completion.
            requirements: what those trainers will want; ``folder`` is for logs.
            adapters: folder that adapters may be loaded from.
        """
        key = self._key()
        _separable(adapters)
        launch = self._launch(requirements, context)
        folders = str(adapters.absolute())
        extra = {"TANDEM_API_KEY": key, "TANDEM_ADAPTER_FOLDERS": folders, "TANDEM_LINGER": "0"}
        served = launch._replace(records=None, environment=lambda i, key: {**launch.environment(i, key), **extra})
        fleet = self._fleet(served, requirements)
        for server in fleet.servers:
            server.key = key
        return fleet.running()

    def beside_ranks(
        self, number: int, *, engines: int, host: str, context: int, requirements: EngineRequirements
    ) -> AbstractAsyncContextManager[Fleet]:
        """Start one engine of several on this host, or find it, for the lead elsewhere; it ends with the block.

        Args:
            number: the engine's among those of the run.
            engines: how many engines the run has.
            host: this host's address, as the lead reaches it; the engine listens there.
            context: most tokens of a prompt and completion.
            requirements: the run's.
        """
        spec = replace(self, host=host, replicas=1, port=self.port + number if self.port else 0)
        launch = spec._launch(requirements, context)
        return spec._fleet(launch, requirements, first=number, every=engines).running()

    def _fleet(self, launch: Launch | None, requirements: EngineRequirements, **numbers: int) -> Fleet:
        servers = [self._server(index) for index in range(len(self.urls) or self.replicas)]
        return Fleet(servers, launch=launch, options=self, requirements=requirements, **numbers)

    def _key(self) -> str:
        """The key that the recipe names; empty where it names none.

        Raises:
            ConfigError: its variable is not set.
        """
        key = os.environ.get(self.api_key_variable, "")
        if self.api_key_variable and not key:
            raise ConfigError(f"engine.api_key_variable: {self.api_key_variable} is not set in the environment")
        return key

    def _server(self, index: int) -> EngineServer:
        if self.urls:
            return self.client(self.urls[index], self._key(), UrlServer)
        try:
            reservation = None if self.port else reserve_port(self.host)
        except OSError as error:
            raise ConfigError(f"engine.host: no port can be had at {self.host}: {error}") from error
        port = self.port + index if reservation is None else reservation.getsockname()[1]
        key = self._key() or (secrets.token_urlsafe(24) if self.require_api_key else "")
        server = self.client(http_url(self.host, port), key)
        server.reservation = reservation
        return server

    def client(self, url: str, key: str, kind: type[EngineServer] = EngineServer) -> EngineServer:
        """A client of an engine, with this recipe's deadlines."""
        return kind(url, key, control_seconds=self.control_seconds, request_seconds=self.request_seconds)

    def _launch(self, requirements: EngineRequirements, context: int) -> Launch:
        """How each engine is started; the model folder may differ from start to start."""
        folder = (requirements.folder or Path.cwd()).absolute()
        _separable(folder)
        return Launch(
            command=partial(self.command, requirements, context),
            environment=partial(self._environment, requirements, folder),
            trainer=_process_identity(),
            log=folder / "logs",
            records=folder if requirements.folder else None,
        )

    def command(
        self, requirements: EngineRequirements, context: int, model: str, port: int, number: int = 0
    ) -> list[str]:
        """The command line of one engine. No two of a run draw the same numbers: siblings would get equal answers."""
        cuda, lora = torch.cuda.is_available(), requirements.payload == "adapter"
        cache = self.kv_cache_gb or (0.0 if cuda else CPU_CACHE_GB)
        options: dict[str, Any] = {
            "model": model,
            "served-model-name": requirements.model,
            "host": self.host,
            "port": port,
            "dtype": requirements.dtype,
            "seed": (requirements.seed + number) % 2**31,
            "max-model-len": self.max_model_len or context,
            # Twice a step's: those that replace its answers or follow them are sampled beside them.
            "max-num-seqs": (self.max_num_seqs or min(max(2 * requirements.answers, 64), 1024)) + PROBES,
            "tensor-parallel-size": self.tensor_parallel_size,
            "logprobs-mode": "processed_logprobs",
            "worker-extension-cls": "tandem.engines.vllm.worker.extension.WorkerExtension",
            "middleware": "tandem.engines.vllm.server.routes.Routes",
            "scheduler-cls": "tandem.engines.vllm.speedups.scheduler",
            "uvicorn-log-level": "warning",
            "enforce-eager": self.enforce_eager,
            "enable-prefix-caching": self.enable_prefix_caching,
            "gpu-memory-utilization": self.gpu_memory_utilization if cuda else None,
            # By default its thread that schedules launches forward passes too: 5 to 20 % slower on every host. Of
            # several workers vLLM itself does so.
            "distributed-executor-backend": "mp" if cuda and self.tensor_parallel_size == 1 else None,
            # On a CPU vLLM dies of a seeded prompt of which it computes a part.
            "enable-chunked-prefill": False if self.seeded and not cuda else None,
            "kv-cache-memory-bytes": int(cache * 1e9) or None,
            "enable-sleep-mode": bool(self.sleep) or None,
            "enable-return-routed-experts": requirements.router_replay or None,
            "limit-mm-per-prompt": self.limit_mm_per_prompt or None,
            "enable-lora": lora or None,
        }
        if lora:
            most = requirements.versions if requirements.capability is LoadsVersions else 1
            rank = next(rank for rank in RANKS if rank >= requirements.rank)
            options |= {"max-lora-rank": rank, "max-loras": most, "max-cpu-loras": most}
            # Above all not the head: with it wrapped, prompt logprobs beside other requests are computed with these
            # requests' places, which ends the engine (vLLM 0.32 on a CPU) or reads past a buffer's end (0.26).
            options["lora-target-modules"] = requirements.targets or LINEAR
        command = [self.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in {**options, **self.args}.items():
            command += flag(name, value)
        return command

    def _environment(self, requirements: EngineRequirements, folder: Path, index: int, key: str) -> dict[str, str]:
        paths = [str(processes.import_path(folder / "logs" / "engine-path"))]
        if self.python is None:  # its interpreter is ours, and may find vLLM by our path alone
            paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        extra: dict[str, str | None] = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TANDEM_API_KEY": key,
            "TANDEM_HOST": self.host,
            "TANDEM_ADAPTER_FOLDERS": str(folder),
            "TANDEM_TRAINER": _process_identity(),
            "TANDEM_LINGER": str(self.linger_seconds),
            AT_ONCE: os.environ.get(AT_ONCE) or str(FEW),
            # Arrays of an answer travel within its message. vLLM 0.26, unlike 0.32, may write the next message over one
            # that has parts of its own for arrays and is being sent: pyzmq's tracker is that of the last part.
            "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": str(1 << 30),
            # Whatever is published to is checksummed, and what was repacked cannot be.
            "TANDEM_IN_PLACE": "1" if requirements.capability is not None else None,
            # Memory of expandable segments cannot be shared between processes.
            "PYTORCH_CUDA_ALLOC_CONF": None,
            "PYTORCH_ALLOC_CONF": None,
        }
        if self.devices:
            extra["CUDA_VISIBLE_DEVICES"] = self.devices[index]
        if not torch.cuda.is_available():
            extra |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(cores()),
                "KMP_BLOCKTIME": "1",  # threads that wait must not spin: the trainer needs the cores
            }
        return processes.environment(os.environ, python=self.python or sys.executable, **extra)


def _process_identity() -> str:
    """This process, for the engine to watch."""
    process = identity(os.getpid())
    return "" if process is None else f"{process.pid}:{process.started}"


def _separable(folder: Path) -> None:
    """See that an engine can be told of a folder: by variables in which this character begins the next one.

    Raises:
        ConfigError: it cannot.
    """
    if os.pathsep in str(folder.absolute()):
        raise ConfigError(
            f"no engine can be told of {folder.absolute()}, for the {os.pathsep!r} in it; choose another name= or runs="
        )


_OF_CLIENTS = frozenset((
    "urls", "max_model_len", "seeded", "api_key_variable", "start_seconds", "request_seconds", "control_seconds",
))  # fmt: skip
"""Options that say how engines are asked, whoever started them."""


_SET_BY_TANDEM = frozenset((
    "--model", "--served-model-name", "--host", "--port", "--dtype", "--seed", "--max-model-len", "--max-num-seqs",
    "--tensor-parallel-size", "--logprobs-mode", "--worker-extension-cls", "--middleware", "--enforce-eager",
    "--enable-prefix-caching", "--gpu-memory-utilization", "--limit-mm-per-prompt", "--enable-lora",
    "--lora-target-modules", "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--api-key", "--api-server-count",
    "--data-parallel-size", "--pipeline-parallel-size", "--enable-sleep-mode", "--kv-cache-memory-bytes",
    "--enable-return-routed-experts",
))  # fmt: skip


def flag(name: str, value: Any) -> list[str]:
    """Words of the command line for an option, none for None; a tuple is several of them."""
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if value is True:
        return [option]
    if value is False:
        return [f"--no-{option[2:]}"]
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    return [option, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def is_taken(name: str) -> bool:
    """Whether an entry of ``args`` is set by Tandem, or is an option of its own."""
    plain = name.replace("_", "-").removeprefix("no-").partition(".")[0]
    # vLLM takes the beginning of a name for the whole.
    return any(option.startswith(f"--{plain}") for option in _SET_BY_TANDEM)
