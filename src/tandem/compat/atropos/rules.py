"""What each flag of Atropos' trainer is in a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.compat.atropos.options import AtroposTranslation, RunningEngine, TrainerFlags
from tandem.config.tree import Problems
from tandem.types import Json

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

DECAY = 0.01
"""Weight decay of Atropos' optimizers of the Adam family: torch's and bitsandbytes' own default."""

LAYOUT = "tandem.compat.atropos.checkpoints:CheckpointLayout"
"""The logger that gives checkpoints Atropos' names."""

BOARD = "tandem.compat.atropos.wandb:AtroposWandb"
"""The logger that gives numbers Atropos' names at Weights & Biases."""

QUEUED = 4
"""Steps that a group of Atropos' environments may wait: they queue three batches by default and sample a fourth."""

MOST = 8
"""Answers per task where nobody says how many, at most."""

_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_layer_indices")
_NCCL = ("nccl_init_method", "nccl_world_size", "nccl_sync_every_step")
_LAUNCH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Flags that only an engine which is started here can obey."""


def translate(
    flags: TrainerFlags, given: frozenset[str], environ: Mapping[str, str], running: RunningEngine | None = None
) -> AtroposTranslation:
    """A recipe that does what the flags ask for.

    Args:
        flags: every flag, with its default where it was left out.
        given: names of those that were not left out.
        environ: LOGDIR, NUM_INFERENCE_NODES, MASTER_ADDR, MASTER_PORT and CUDA_VISIBLE_DEVICES are read.
        running: the engine that serves where one would be started.

    Raises:
        ConfigError: with every flag that is wrong, or asks for another objective or result than can be had.
    """
    problems = Problems()
    reading = TrainerRecipe(flags=flags, given=given, environ=environ, problems=problems, running=running)
    options = reading.recipe()
    problems.raise_if_any("the command line")
    return AtroposTranslation(options=options, notes=tuple(dict.fromkeys(reading.notes)), environ=reading.device())


@dataclass(frozen=True, kw_only=True)
class TrainerRecipe:
    """One command line, read part by part; mistakes and notes are gathered."""

    flags: TrainerFlags
    """Every flag, with its default where it was left out."""
    given: frozenset[str]
    """Names of those that were not left out."""
    environ: Mapping[str, str]
    """Environment variables."""
    problems: Problems
    """Where mistakes go."""
    running: RunningEngine | None = None
    """An engine that serves where one would be started."""
    notes: list[str] = field(default_factory=list)
    """What the recipe does otherwise than the flags would have it."""

    def recipe(self) -> dict[str, Json]:
        """The whole recipe."""
        flags = self.flags
        if flags.weight_bridge_mode not in WAYS:
            self._wrong("weight_bridge_mode", f"there is no way {flags.weight_bridge_mode!r}; ways: {', '.join(WAYS)}")
            return {}
        every, size = self._every(), self._group_size()
        lag = self._lag(every)
        if flags.env is None:
            self._note("atropos_url", f"groups that are more than {lag} steps old (max_lag) are left out")
        if flags.debug_loading:
            self._note("debug_loading", "nothing more is printed; tandem --debug shows an error's traceback")
        return {
            "model": flags.model_name,
            "steps": flags.training_steps,
            **self._source(),
            "groups_per_step": self._groups(size),
            "group_size": size,
            **({"max_lag": lag} if lag else {}),
            "sampling": {"max_tokens": flags.seq_len},
            "advantage": {"kind": "grpo", "std": "population", "eps": 1e-8},
            "loss": self._loss(),
            "optimizer": self._optimizer(),
            "trainable": self._trainable(),
            "engine": self._engine(),
            "sync": self._sync(every),
            "dtype": self._dtype(),
            "micro_batch_tokens": flags.batch_size * flags.seq_len,
            "context": flags.seq_len,
            **({"evaluate": {"tasks": 0}} if flags.env else {}),
            "checkpoint": {"every": flags.checkpoint_interval or flags.training_steps},
            "loggers": self._loggers(),
            "runs": flags.log_dir or self.environ.get("LOGDIR") or "logs",
        }

    def device(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of ``--device``: empty where that says no more than the default.

        The engine sees the same, and takes the trainer's GPU unless ``--vllm-gpu`` names another.
        """
        name, _, index = (self.flags.device or "cuda").partition(":")
        if name == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        if not int(index or 0):
            return {}
        seen = self.environ.get("CUDA_VISIBLE_DEVICES")
        return {"CUDA_VISIBLE_DEVICES": index if seen is None else seen.split(",")[int(index)].strip()}

    @property
    def _lora(self) -> bool:
        return WAYS[self.flags.weight_bridge_mode][0] == "lora"

    @property
    def _urls(self) -> list[str]:
        """Engines that run already."""
        return list(self.flags.vllm_url) or ([self.running.url] if self.running else [])

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

    @property
    def _way(self) -> str:
        """How weights travel: as the mode says, or as near to it as goes with an engine that is not ours to end."""
        way = WAYS[self.flags.weight_bridge_mode][1]
        if way == "restart" and (self._urls or self._nodes):
            return "hotswap" if self._lora else "broadcast"
        if way == "shared" and (self._nodes or self.flags.use_shared_memory):
            return "broadcast"
        return way

    def _wrong(self, name: str, message: str) -> None:
        if name == "num_inference_nodes" and name not in self.given:
            self.problems.add("NUM_INFERENCE_NODES, of the environment", message)
        else:
            self.problems.add(f"--{name.replace('_', '-')}", message)

    def _note(self, name: str, message: str) -> None:
        self.notes.append(f"--{name.replace('_', '-')}: {message}")

    def _unread(self, names: Sequence[str], why: str) -> None:
        """Tell of flags that change nothing."""
        for name in names:
            if name in self.given:
                self._note(name, f"it changes nothing {why}")

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

    def _group_size(self) -> int:
        """As asked for, or else the largest that divides a step's sequences."""
        for name in ("batch_size", "gradient_accumulation_steps", "seq_len", "training_steps"):
            if getattr(self.flags, name) < 1:
                self._wrong(name, "it must be at least 1")
                return MOST
        if self.flags.group_size is not None:
            return self.flags.group_size
        sequences = self.flags.batch_size * self.flags.gradient_accumulation_steps
        return next((size for size in range(MOST, 1, -1) if sequences % size == 0), sequences)

    def _groups(self, size: int) -> int:
        """Groups of one optimizer step."""
        batch, steps = self.flags.batch_size, self.flags.gradient_accumulation_steps
        if size < 2:
            name = "group_size" if self.flags.group_size is not None else "gradient_accumulation_steps"
            self._wrong(name, "a step needs two answers to one task at least: an answer is judged against its siblings")
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
        flags, eps = self.flags, self.flags.clip_eps
        if not 0 <= eps <= 1:
            self._wrong("clip_eps", "it must be between 0 and 1")
        if flags.kl_coef:
            self._wrong("kl_coef", "no loss has a penalty on the distance to the weights that sampled; leave it out")
        if flags.no_reference_logprobs:
            self._wrong(
                "no_reference_logprobs", "ratios are to sampling's logprobs; for a loss without: loss=reinforce"
            )
        if flags.distill_enabled:
            self._wrong("distill_enabled", "no loss reads a teacher's distill_token_ids and distill_logprobs")
        self._unread(("distill_coef", "distill_temperature"), "without --distill-enabled")
        return {"kind": "grpo", "clip_low": eps, "clip_high": eps, "dual_clip": None, "reduction": "sequence"}

    def _optimizer(self) -> Json:
        flags = self.flags
        if flags.optimizer not in OPTIMIZERS:
            self._wrong("optimizer", f"there is no {flags.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
        kind = OPTIMIZERS.get(flags.optimizer, "adamw")
        warmup: dict[str, Json] = {"warmup_steps": flags.warmup_steps} if flags.warmup_steps else {}
        if kind == "adafactor":
            if flags.adafactor_relative_step:
                self._wrong(
                    "adafactor_relative_step", "the rate is --lr, and Adafactor cannot choose it too: leave it out"
                )
            return {"kind": kind, "lr": flags.lr, "relative_rate": flags.adafactor_scale_parameter, **warmup}
        self._unread(("adafactor_scale_parameter", "adafactor_relative_step"), f"with --optimizer {flags.optimizer}")
        return {"kind": kind, "lr": flags.lr, "weight_decay": DECAY, **warmup}

    def _trainable(self) -> Json:
        flags, mode = self.flags, f"with --weight-bridge-mode {self.flags.weight_bridge_mode}"
        if not self._lora:
            self._unread(_LORA, f"{mode}, which trains no adapter")
            layers = self._layers("train_layer_indices")
            return {"kind": "full", **layers}
        self._unread(("train_layer_indices",), f"{mode}; an adapter's layers are --lora-layer-indices")
        if flags.lora_dropout:
            self._note(
                "lora_dropout",
                f"{flags.lora_dropout:g} is left out: the policy that is scored must be the policy that sampled, or "
                "the ratio of an untouched token is not 1",
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
        flags, urls = self.flags, self._urls
        self._check_nodes()
        self._check_device()
        if urls or self._nodes:
            self._unread(_LAUNCH, "on an engine that runs already, which was told when it was started")
            if flags.vllm_url:
                self._unread(("vllm_port",), "beside --vllm-url, which has the port")
            return {"kind": "vllm", "urls": urls}
        if self._way == "shared" and flags.vllm_gpu:
            self._wrong("vllm_gpu", "shared weights are on the trainer's GPU; choose it by CUDA_VISIBLE_DEVICES")
        if flags.max_model_len < flags.seq_len:
            self._note("max_model_len", f"answers end at {flags.max_model_len} tokens, below --seq-len {flags.seq_len}")
        return {
            "kind": "vllm",
            "port": flags.vllm_port,
            **({} if flags.env else {"require_api_key": False}),  # environments in other terminals sample from it
            "gpu_memory_utilization": flags.gpu_memory_utilization,
            "max_model_len": flags.max_model_len,
            **({"devices": [str(flags.vllm_gpu)]} if flags.vllm_gpu is not None else {}),
        }

    def _check_nodes(self) -> None:
        """Engines that run already: as many addresses as engines, and what goes on with one that is not restarted."""
        flags, nodes, mode = self.flags, self._nodes, self.flags.weight_bridge_mode
        if nodes and len(flags.vllm_url) != nodes:
            named = f"and {len(flags.vllm_url)} are named: --vllm-url http://NODE:{flags.vllm_port} once for each"
            self._wrong("num_inference_nodes", f"{nodes} engines on other nodes need {nodes} addresses, {named}")
        elif WAYS[mode][1] == "restart" and self._urls:
            does = "adapters are swapped in" if self._lora else "weights are broadcast to it"
            self._note(
                "weight_bridge_mode",
                f"{mode} restarts the engine, but the one at {self._urls[0]} was not started here and is left running: "
                f"{does} instead",
            )
        if nodes and mode == "shared_vllm":
            self._note("num_inference_nodes", "memory cannot be shared between nodes, so full weights are broadcast")
        if flags.trainer_rank:
            self._wrong("trainer_rank", "the trainer is one process, rank 0; start it once and leave this out")
        expected = 1 + nodes
        if "world_size" in self.given and flags.world_size != expected:
            self._wrong("world_size", f"the trainer and {nodes} engines on other nodes are {expected}")

    def _check_device(self) -> None:
        """A device that there can be."""
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", self.flags.device or "cuda")
        seen = self.environ.get("CUDA_VISIBLE_DEVICES")
        if match is None:
            self._wrong("device", f"{self.flags.device!r} is neither cuda, cuda:N nor cpu")
        elif match[1] and seen is not None and int(match[1]) and int(match[1]) >= len(seen.split(",")):
            self._wrong("device", f"{self.flags.device} is not among CUDA_VISIBLE_DEVICES={seen}")

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
        flags, mode, way = self.flags, self.flags.weight_bridge_mode, self._way
        nccl = mode == "lora_nccl"
        distributed = way == "broadcast" and not nccl and self._nodes > 0
        if not nccl:
            self._unread(_NCCL, f"with --weight-bridge-mode {mode}; it belongs to lora_nccl")
        elif "nccl_world_size" in self.given and flags.nccl_world_size != (size := 1 + max(1, len(flags.vllm_url))):
            self._wrong("nccl_world_size", f"the trainer and its engines are {size}; name others by --vllm-url")
        if not distributed:
            self._unread(("init_method",), "unless there are engines on other nodes (--num-inference-nodes)")
        if way != "shared":
            self._unread(("single_copy", "use_cuda_ipc", "vllm_config_path"), "unless weights are shared")
        elif flags.single_copy or flags.use_cuda_ipc:
            self._note("single_copy" if flags.single_copy else "use_cuda_ipc", "sync shared is always one copy")
        if mode != "shared_vllm":
            self._unread(("use_shared_memory",), f"with --weight-bridge-mode {mode}; it belongs to shared_vllm")
        if distributed or nccl:
            name = "nccl_init_method" if nccl else "init_method"
            return {"kind": "broadcast", "every": every, **self._meeting(name)}
        if way == "shared":
            bridge = self.running.bridge if self.running else None
            return {"kind": way, **({"bridge": bridge} if bridge else {})}
        return {"kind": way, "every": every}

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
        return {"host": match[1], "port": int(match[2])}

    def _dtype(self) -> str:
        dtype = self.flags.dtype
        if dtype in ("auto", "float16"):
            self._note("dtype", f"{dtype} is bfloat16, in which Atropos' trainer computes: both have one type here")
            return "bfloat16"
        if dtype not in ("bfloat16", "float32"):
            self._wrong("dtype", f"Tandem trains bfloat16 or float32, not {dtype}; name one of them")
        return dtype

    def _loggers(self) -> list[Json]:
        flags = self.flags
        named = {"project": flags.wandb_project, "group": flags.wandb_group}
        board = {"kind": BOARD, **{key: value for key, value in named.items() if value is not None}}
        if not flags.use_wandb:
            self._unread(("wandb_project", "wandb_group"), "without --use-wandb")
        layout = {"kind": LAYOUT, "save_path": flags.save_path}
        return ["console", *([board] if flags.use_wandb else []), layout]
