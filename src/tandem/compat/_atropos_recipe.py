"""What each flag of Atropos' trainer is in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.recipe.tree import Problems
from tandem.types import Json

if TYPE_CHECKING:
    from tandem.compat.atropos import Flags

WAYS = {
    "none": ("full", "restart"),
    "shared_vllm": ("full", "shared"),
    "lora_only": ("lora", "hotswap"),
    "lora_restart": ("lora", "restart"),
    "lora_nccl": ("lora", "broadcast"),
}
"""--weight-bridge-mode: what is trained, and how it travels."""

OPTIMIZERS = {"adamw": "adamw", "adamw_8bit": "adamw8bit", "adamw_cpu": "adamw_cpu", "adafactor": "adafactor"}
"""--optimizer: the part."""

LAYOUT = "tandem.compat.atropos:Layout"
"""The sink that gives checkpoints Atropos' names."""

QUEUED = 4
"""Steps that a group of Atropos' environments may wait: they queue three batches by default and sample a fourth."""

_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_layer_indices")
_NCCL = ("nccl_init_method", "nccl_world_size", "nccl_sync_every_step")
_LAUNCH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Flags that only an engine which is started here can obey."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One command line, read part by part; mistakes are gathered."""

    flags: Flags
    """Every flag, with its default where it was left out."""
    given: frozenset[str]
    """Names of those that were not left out."""
    environ: Mapping[str, str]
    """Environment variables."""
    problems: Problems
    """Where mistakes go."""

    def recipe(self) -> dict[str, Json]:
        """The whole recipe."""
        flags = self.flags
        if flags.weight_bridge_mode not in WAYS:
            self._wrong("weight_bridge_mode", f"there is no way {flags.weight_bridge_mode!r}; ways: {', '.join(WAYS)}")
            return {}
        every = self._every()
        return {
            "model": flags.model_name,
            "steps": flags.training_steps,
            **self._source(),
            "groups_per_step": self._groups(),
            "group_size": flags.group_size,
            **({"max_lag": lag} if (lag := self._lag(every)) else {}),
            "sampling": {"max_tokens": flags.seq_len},
            "advantage": {"kind": "grpo", "std": "population", "eps": 1e-8},
            "loss": self._loss(),
            "optimizer": self._optimizer(),
            "trains": self._trains(),
            "engine": self._engine(),
            "sync": self._sync(every),
            "dtype": self._dtype(),
            "micro_batch_tokens": flags.batch_size * flags.seq_len,
            "context": flags.seq_len,
            **({"evaluate": {"tasks": 0}} if flags.env else {}),
            "checkpoint": {"every": flags.checkpoint_interval or flags.training_steps},
            "sinks": self._sinks(),
            "runs": flags.log_dir or self.environ.get("LOGDIR") or "logs",
        }

    def notes(self) -> Iterator[str]:
        """What the recipe does otherwise than the flags would have it."""
        if self.flags.env is None:
            lag = self._lag(self._every())
            yield f"--atropos-url: groups that are more than {lag} steps old (max_lag) are left out"
        if self._lora and "lora_dropout" not in self.given:
            yield "--lora-dropout: Atropos' default of 0.05 is left out, for Tandem has no dropout"
        if self.flags.single_copy:
            yield "--single-copy: sync shared is always one copy"
        if self.flags.vllm_config_path:
            yield "--vllm-config-path: the running engine is asked for its map, at its address; the file is not read"
        if self.flags.weight_bridge_mode == "shared_vllm" and self._nodes:
            yield "--num-inference-nodes: memory cannot be shared between nodes, so full weights are broadcast"

    @property
    def _lora(self) -> bool:
        return WAYS[self.flags.weight_bridge_mode][0] == "lora"

    @property
    def _external(self) -> bool:
        """True if the engine runs already."""
        return bool(self.flags.vllm_url or self.flags.vllm_config_path or self._nodes)

    @property
    def _nodes(self) -> int:
        """Engines on other nodes."""
        if "num_inference_nodes" in self.given:
            text = str(self.flags.num_inference_nodes)
        else:
            text = self.environ.get("NUM_INFERENCE_NODES", "").strip() or "0"
        if not text.isdecimal():
            self._wrong("num_inference_nodes", f"it must be a whole number, at least 0, not {text}")
            return 0
        return int(text)

    def _wrong(self, name: str, message: str) -> None:
        if name == "num_inference_nodes" and name not in self.given:
            self.problems.add("NUM_INFERENCE_NODES, of the environment", message)
        else:
            self.problems.add(f"--{name.replace('_', '-')}", message)

    def _unread(self, names: Sequence[str], why: str) -> None:
        """Refuse flags that would change nothing."""
        for name in names:
            if name in self.given:
                self._wrong(name, f"it changes nothing {why}; leave it out")

    def _source(self) -> dict[str, Json]:
        """Where groups come from: an Atropos server, as in Atropos, or an environment of Tandem's."""
        if self.flags.env is None:
            url = self.flags.atropos_url
            if not url.startswith(("http://", "https://")):
                self._wrong("atropos_url", f"{url} must begin with http:// or https://")
            return {"broker": url}
        self._unread(("atropos_url",), "with --env, which is where groups come from")
        return {"env": self.flags.env}

    def _lag(self, every: int) -> int:
        """Between two publishes tokens come from weights that are up to every - 1 steps old; a server's wait, too."""
        return every - 1 + (0 if self.flags.env else QUEUED)

    def _groups(self) -> int:
        """Groups of one optimizer step."""
        batch, steps, size = self.flags.batch_size, self.flags.gradient_accumulation_steps, self.flags.group_size
        for name in ("batch_size", "gradient_accumulation_steps", "group_size", "seq_len", "training_steps"):
            if getattr(self.flags, name) < 1:
                self._wrong(name, "it must be at least 1")
                return 1
        groups, rest = divmod(batch * steps, size)
        if rest or not groups:
            self._wrong(
                "group_size",
                f"a step has --batch-size {batch} x --gradient-accumulation-steps {steps} = {batch * steps} "
                f"sequences, which are no whole number of groups of {size}; change one of the three",
            )
        return groups

    def _loss(self) -> Json:
        """Each sequence's mean over its tokens, then the mean over sequences, as Atropos divides it."""
        eps = self.flags.clip_eps
        if not 0 <= eps <= 1:
            self._wrong("clip_eps", "it must be between 0 and 1")
        return {"kind": "grpo", "clip_low": eps, "clip_high": eps, "dual_clip": None, "reduction": "sequence"}

    def _optimizer(self) -> Json:
        flags = self.flags
        if flags.optimizer not in OPTIMIZERS:
            self._wrong("optimizer", f"there is no {flags.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
        kind = OPTIMIZERS.get(flags.optimizer, "adamw")
        return {"kind": kind, "lr": flags.lr, **({"warmup_steps": flags.warmup_steps} if flags.warmup_steps else {})}

    def _trains(self) -> Json:
        flags, mode = self.flags, f"with --weight-bridge-mode {self.flags.weight_bridge_mode}"
        if not self._lora:
            self._unread(_LORA, f"{mode}, which trains no adapter")
            layers = self._layers("train_layer_indices")
            return {"kind": "full", **layers}
        self._unread(("train_layer_indices",), f"{mode}; an adapter's layers are --lora-layer-indices")
        if "lora_dropout" in self.given and flags.lora_dropout:
            self._wrong(
                "lora_dropout",
                "Tandem has no dropout: the policy that is scored must be the policy that sampled, or the ratio of an "
                "untouched token is not 1; leave it out or write 0",
            )
        modules = re.split(r"[\s,]+", flags.lora_target_modules.strip())
        return {
            "kind": "lora",
            "rank": flags.lora_r,
            "alpha": flags.lora_alpha,
            "target_modules": "all-linear" if modules == ["all-linear"] else modules,
            **self._layers("lora_layer_indices"),
        }

    def _layers(self, name: str) -> dict[str, Json]:
        """``{layers: [...]}`` of ``0-3,10``; nothing if the flag was left out."""
        text: str | None = getattr(self.flags, name)
        if text is None:
            return {}
        layers: set[int] = set()
        for piece in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
            if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
                self._wrong(name, f"{piece.strip()!r} is neither a layer nor a rising range; write such as 0-3,10")
                return {}
            layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return {"layers": sorted(layers)}

    def _engine(self) -> Json:
        flags = self.flags
        self._check_nodes()
        if flags.max_model_len < flags.seq_len and not self._external:
            self._wrong("max_model_len", f"{flags.max_model_len} is below --seq-len {flags.seq_len}; lower that too")
        if self._external:
            self._unread(_LAUNCH, "on an engine that runs already; give it to that engine when it is started")
            if flags.vllm_url:
                self._unread(("vllm_port",), "beside --vllm-url, which has the port")
            return {"kind": "vllm", "urls": list(flags.vllm_url) or [f"http://localhost:{flags.vllm_port}"]}
        shared = WAYS[flags.weight_bridge_mode][1] == "shared"
        if shared and flags.vllm_gpu:
            self._wrong("vllm_gpu", "shared weights are on the trainer's GPU; choose it by CUDA_VISIBLE_DEVICES")
        return {
            "kind": "vllm",
            "port": flags.vllm_port,
            "gpu_memory_utilization": flags.gpu_memory_utilization,
            "max_model_len": flags.max_model_len,
            **({"devices": [str(flags.vllm_gpu)]} if flags.vllm_gpu is not None else {}),
        }

    def _check_nodes(self) -> None:
        """Engines that run already: as many addresses as engines, and a way that reaches them."""
        flags, nodes = self.flags, self._nodes
        if WAYS[flags.weight_bridge_mode][1] == "restart" and self._external:
            name = "vllm_url" if flags.vllm_url else "num_inference_nodes" if nodes else "vllm_config_path"
            why = "restarts the engine, and only one that Tandem started can be; leave it out, or choose another mode"
            self._wrong(name, f"--weight-bridge-mode {flags.weight_bridge_mode} {why}")
        elif nodes and len(flags.vllm_url) != nodes:
            named = f"and {len(flags.vllm_url)} are named: --vllm-url http://NODE:{flags.vllm_port} once for each"
            self._wrong("num_inference_nodes", f"{nodes} engines on other nodes need {nodes} addresses, {named}")
        if flags.trainer_rank:
            self._wrong("trainer_rank", "the trainer is one process, rank 0; start it once and leave this out")
        expected = 1 + nodes
        if "world_size" in self.given and flags.world_size != expected:
            self._wrong("world_size", f"the trainer and {nodes} engines on other nodes are {expected}")

    def _every(self) -> int:
        """Steps from one publish to the next."""
        flags, mode = self.flags, self.flags.weight_bridge_mode
        if mode == "shared_vllm" or (mode == "lora_nccl" and flags.nccl_sync_every_step):
            self._unread(("vllm_restart_interval",), f"with --weight-bridge-mode {mode}, which syncs every step")
            return 1
        if flags.vllm_restart_interval < 1:
            self._wrong("vllm_restart_interval", "it must be at least 1")
        return flags.vllm_restart_interval

    def _sync(self, every: int) -> Json:
        flags, mode = self.flags, self.flags.weight_bridge_mode
        kind = WAYS[mode][1]
        nccl, distributed = mode == "lora_nccl", mode == "shared_vllm" and self._nodes > 0
        if not nccl:
            self._unread(_NCCL, f"with --weight-bridge-mode {mode}; it belongs to lora_nccl")
        elif "nccl_world_size" in self.given and flags.nccl_world_size != (size := 1 + max(1, len(flags.vllm_url))):
            self._wrong("nccl_world_size", f"the trainer and its engines are {size}; name others by --vllm-url")
        if not distributed:
            self._unread(("init_method",), "unless shared_vllm has engines on other nodes (--num-inference-nodes)")
        if mode != "shared_vllm" or distributed:
            self._unread(("single_copy", "vllm_config_path"), "unless weights are shared on this machine")
        if distributed or nccl:
            name = "nccl_init_method" if nccl else "init_method"
            return {"kind": "broadcast", "every": every, **self._meeting(name)}
        return {"kind": kind} if kind == "shared" else {"kind": kind, "every": every}

    def _meeting(self, name: str) -> dict[str, Json]:
        """Host and port of a flag's ``tcp://host:port``, or of the environment where it says env://."""
        method: str = getattr(self.flags, name)
        if method == "env://":
            host, port = (self.environ.get(variable, "") for variable in ("MASTER_ADDR", "MASTER_PORT"))
            if not host or not port:
                missing = "MASTER_PORT" if host else "MASTER_ADDR"
                self._wrong(name, f"env:// reads {missing}, which is not set; set it or write tcp://HOST:PORT")
                return {}
            method = f"tcp://{host}:{port}"
        match = re.fullmatch(r"tcp://(.+):(\d+)", method)
        if match is None:
            self._wrong(name, f"{method} is not written as tcp://HOST:PORT")
            return {}
        return {"host": match[1], "port_number": int(match[2])}

    def _dtype(self) -> str:
        if self.flags.dtype not in ("bfloat16", "float32"):
            self._wrong("dtype", f"Tandem trains bfloat16 or float32, not {self.flags.dtype}; name one of them")
        return self.flags.dtype

    def _sinks(self) -> list[Json]:
        flags = self.flags
        named = {"project": flags.wandb_project, "group": flags.wandb_group}
        board = {"kind": "wandb", **{key: value for key, value in named.items() if value is not None}}
        if not flags.use_wandb:
            self._unread(("wandb_project", "wandb_group"), "without --use-wandb")
        layout = {"kind": LAYOUT, "save_path": flags.save_path}
        return ["console", *([board] if flags.use_wandb else []), layout]
