"""``tandem atropos-grpo``: the flags of Atropos' trainer as a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tandem.types import Json
from tandem_compat.atropos.options import TRAINER
from tandem_compat.table import Reader, Translation

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

LAYOUT = "tandem_compat.atropos.checkpoints:CheckpointLayout"
"""The logger that gives checkpoints Atropos' names."""

QUEUED = 4
"""Steps that a group of Atropos' environments may wait: they queue three batches by default and sample a fourth."""

MOST = 8
"""Most answers per task where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that serves already, and is to be used instead of one that would be started."""

    url: str
    """Its address."""
    bridge: str | None = None
    """The file by which it lends its weights; None: it is asked."""


def read(values: Mapping[str, Json]) -> Reader:
    """The flags of a command line.

    Raises:
        ConfigError: with every value of another type.
    """
    return Reader.of_command_line(TRAINER, values)


def translate(flags: Reader, environ: Mapping[str, str], running: RunningEngine | None = None) -> Translation:
    """A recipe that does what the flags ask for.

    Args:
        flags: as ``read`` has them.
        environ: LOGDIR, NUM_INFERENCE_NODES, MASTER_ADDR, MASTER_PORT and CUDA_VISIBLE_DEVICES are read.
        running: the engine that serves where one would be started.

    Raises:
        ConfigError: with every flag that is wrong, or asks for another objective or result than can be had.
    """
    recipe = TrainerRecipe(flags, environ, running)
    options = recipe.recipe()
    flags.problems.raise_if_any("the command line")
    return Translation(options=options, notes=tuple(dict.fromkeys(flags.notes)), environ=recipe.device())


class TrainerRecipe:
    """One command line of the trainer, made a recipe part by part."""

    def __init__(self, flags: Reader, environ: Mapping[str, str], running: RunningEngine | None) -> None:
        self.flags = flags
        self.environ = environ
        self.running = running
        self.mode: str = flags["weight-bridge-mode"]

    def recipe(self) -> dict[str, Json]:
        """The whole recipe."""
        flags = self.flags
        if self.mode not in WAYS:
            flags.wrong("weight-bridge-mode", f"there is no way {self.mode!r}; ways: {', '.join(WAYS)}")
            return {}
        if not flags["model-name"]:
            flags.wrong("model-name", "it is missing: a Hugging Face id or a folder")
        flags.settle_all(self._places())
        every, size = self._every(), self._group_size()
        lag = every - 1 + (0 if flags["env"] else QUEUED)  # between two publishes, and in a server's queue
        if flags["env"] is None:
            flags.note("atropos-url", f"groups that are more than {lag} steps old (max_lag) are left out")
        if flags["debug-loading"]:
            flags.note("debug-loading", "nothing more is printed; tandem --debug shows an error's traceback")
        return {
            "model": flags["model-name"],
            "steps": flags["training-steps"],
            **self._source(),
            "groups_per_step": self._groups(size),
            "group_size": size,
            **({"max_lag": lag} if lag else {}),
            "sampling": {"max_tokens": flags["seq-len"]},
            "advantage": {"kind": "grpo", "std": "population", "eps": 1e-8},
            "loss": self._loss(),
            "optimizer": self._optimizer(),
            "trainable": self._trainable(),
            "engine": self._engine(),
            "sync": self._sync(every),
            "dtype": self._dtype(),
            "micro_batch_tokens": flags["batch-size"] * flags["seq-len"],
            "context": flags["seq-len"],
            **({"evaluate": {"tasks": 0}} if flags["env"] else {}),
            "checkpoint": {"every": flags["checkpoint-interval"] or flags["training-steps"]},
            "loggers": self._loggers(),
            "runs": flags["log-dir"] or self.environ.get("LOGDIR") or "logs",
        }

    def device(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of ``--device``: empty where that says no more than the default.

        The engine sees the same, and takes the trainer's GPU unless ``--vllm-gpu`` names another.
        """
        name, _, index = (self.flags["device"] or "cuda").partition(":")
        if name == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        if not int(index or 0):
            return {}
        seen = self.environ.get("CUDA_VISIBLE_DEVICES")
        return {"CUDA_VISIBLE_DEVICES": index if seen is None else seen.split(",")[int(index)].strip()}

    def _places(self) -> dict[str, str]:
        """Why flags of each place change nothing; empty where they count."""
        flags, mode = self.flags, f"with --weight-bridge-mode {self.mode}"
        nccl, runs = self.mode == "lora_nccl", bool(self._urls or self._nodes)
        return {
            "teacher": "" if flags["distill-enabled"] else "without --distill-enabled",
            "adafactor": "" if flags["optimizer"] == "adafactor" else f"with --optimizer {flags['optimizer']}",
            "adapter": "" if self._lora else f"{mode}, which trains no adapter",
            "full": f"{mode}; an adapter's layers are --lora-layer-indices" if self._lora else "",
            "shared": "" if self._way == "shared" else "unless weights are shared",
            "shared_vllm": "" if self.mode == "shared_vllm" else f"{mode}; it belongs to shared_vllm",
            "nccl": "" if nccl else f"{mode}; it belongs to lora_nccl",
            "interval": f"{mode}, which syncs every step" if self._each_step else "",
            "nodes": "" if self._distributed else "unless there are engines on other nodes (--num-inference-nodes)",
            "started": "on an engine that runs already, which was told when it was started" if runs else "",
            "no url": "beside --vllm-url, which has the port" if flags["vllm-url"] else "",
            "broker": "with --env, which is where groups come from" if flags["env"] else "",
            "wandb": "" if flags["use-wandb"] else "without --use-wandb",
        }

    @property
    def _lora(self) -> bool:
        return WAYS[self.mode][0] == "lora"

    @property
    def _urls(self) -> list[str]:
        """Engines that run already."""
        return list(self.flags["vllm-url"]) or ([self.running.url] if self.running else [])

    @cached_property
    def _nodes(self) -> int:
        """Engines on other nodes."""
        name, variable = "num-inference-nodes", self.environ.get("NUM_INFERENCE_NODES", "").strip() or "0"
        text = str(self.flags[name]) if name in self.flags else variable
        if not text.isdecimal():
            self._wrong_nodes(f"it must be a whole number, at least 0, not {text}")
            return 0
        return int(text)

    def _wrong_nodes(self, message: str) -> None:
        """Note a mistake in the number of nodes, where it was said."""
        name = "num-inference-nodes"
        where = self.flags.place(name) if name in self.flags else "NUM_INFERENCE_NODES, of the environment"
        self.flags.problems.add(where, message)

    @property
    def _way(self) -> str:
        """How weights travel: as the mode says, or as near to it as goes with an engine that is not ours to end."""
        way = WAYS[self.mode][1]
        if way == "restart" and (self._urls or self._nodes):
            return "hotswap" if self._lora else "broadcast"
        if way == "shared" and (self._nodes or self.flags["use-shared-memory"]):
            return "broadcast"
        return way

    @property
    def _distributed(self) -> bool:
        """Whether whole weights are broadcast to other nodes."""
        return self._way == "broadcast" and self.mode != "lora_nccl" and self._nodes > 0

    @property
    def _each_step(self) -> bool:
        """Whether the mode publishes after every step."""
        return self.mode == "shared_vllm" or (self.mode == "lora_nccl" and self.flags["nccl-sync-every-step"])

    def _source(self) -> dict[str, Json]:
        """Where groups come from: an Atropos server, as in Atropos, or an environment of Tandem's."""
        if self.flags["env"] is not None:
            return {"env": self.flags["env"]}
        url = self.flags["atropos-url"]
        if not url.startswith(("http://", "https://")):
            self.flags.wrong("atropos-url", f"{url} must begin with http:// or https://")
        return {"broker": url}

    def _group_size(self) -> int:
        """As asked for, or else the largest that divides a step's sequences."""
        flags = self.flags
        for name in ("batch-size", "gradient-accumulation-steps", "seq-len", "training-steps"):
            if flags[name] < 1:
                flags.wrong(name, "it must be at least 1")
        sequences = flags["batch-size"] * flags["gradient-accumulation-steps"]
        usual = next((size for size in range(MOST, 1, -1) if sequences % size == 0), sequences)
        return int(usual if flags["group-size"] is None else flags["group-size"])

    def _groups(self, size: int) -> int:
        """Groups of one optimizer step."""
        flags = self.flags
        batch, steps = flags["batch-size"], flags["gradient-accumulation-steps"]
        if min(batch, steps) < 1:  # which is reported already
            return 1
        if size < 2:
            name = "group-size" if flags["group-size"] is not None else "gradient-accumulation-steps"
            flags.wrong(name, "a step needs two answers to one task at least: an answer is judged against its siblings")
            return 1
        groups, rest = divmod(batch * steps, size)
        if rest or not groups:
            flags.wrong(
                "group-size",
                f"a step has --batch-size {batch} x --gradient-accumulation-steps {steps} = {batch * steps} "
                f"sequences, which are no whole number of groups of {size}; change one of the three",
            )
        return int(groups)

    def _loss(self) -> Json:
        """Each sequence's mean over its tokens, then the mean over sequences, as Atropos divides it."""
        if not 0 <= (eps := self.flags["clip-eps"]) <= 1:
            self.flags.wrong("clip-eps", "it must be between 0 and 1")
        return {"kind": "grpo", "clip_low": eps, "clip_high": eps, "dual_clip": None, "reduction": "sequence"}

    def _optimizer(self) -> Json:
        flags, name = self.flags, self.flags["optimizer"]
        if name not in OPTIMIZERS:
            flags.wrong("optimizer", f"there is no {name!r}; choose from {', '.join(OPTIMIZERS)}")
        options: dict[str, Json] = {"kind": OPTIMIZERS.get(name, "adamw"), "lr": flags["lr"]}
        if name == "adafactor":
            options["relative_rate"] = flags["adafactor-scale-parameter"]
            if flags["adafactor-relative-step"]:
                why = "the rate is --lr, and Adafactor cannot choose it too: leave it out"
                flags.wrong("adafactor-relative-step", why)
        else:
            options["weight_decay"] = DECAY
        return options | ({"warmup_steps": flags["warmup-steps"]} if flags["warmup-steps"] else {})

    def _trainable(self) -> Json:
        flags = self.flags
        if not self._lora:
            return {"kind": "full", **self._layers("train-layer-indices")}
        if dropout := flags["lora-dropout"]:
            flags.note(
                "lora-dropout",
                f"{dropout:g} is left out: the policy that is scored must be the policy that sampled, or the ratio of "
                "an untouched token is not 1",
            )
        modules = re.split(r"[\s,]+", flags["lora-target-modules"].strip())
        return {
            "kind": "lora",
            "rank": flags["lora-r"],
            "alpha": flags["lora-alpha"],
            "target_modules": "all-linear" if modules == ["all-linear"] else modules,
            **self._layers("lora-layer-indices"),
        }

    def _layers(self, name: str) -> dict[str, Json]:
        """``{layers: [...]}`` of ``0-3,10``; nothing if the flag was left out."""
        layers: set[int] = set()
        if self.flags[name] is None:
            return {}
        for piece in self.flags[name].split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
            if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
                self.flags.wrong(name, f"{piece.strip()!r} is neither a layer nor a rising range; write such as 0-3,10")
                return {}
            layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return {"layers": sorted(layers)}

    def _engine(self) -> Json:
        flags = self.flags
        self._check_nodes()
        self._check_device()
        if self._urls or self._nodes:
            return {"kind": "vllm", "urls": self._urls}
        gpu, longest = flags["vllm-gpu"], flags["max-model-len"]
        if self._way == "shared" and gpu:
            flags.wrong("vllm-gpu", "shared weights are on the trainer's GPU; choose it by CUDA_VISIBLE_DEVICES")
        if gpu is not None and gpu < 0:
            flags.wrong("vllm-gpu", f"it must be at least 0, not {gpu}")
        if longest < flags["seq-len"]:
            flags.note("max-model-len", f"answers end at {longest} tokens, below --seq-len {flags['seq-len']}")
        return {
            "kind": "vllm",
            "port": flags["vllm-port"],
            **({} if flags["env"] else {"require_api_key": False}),  # environments in other terminals sample from it
            "gpu_memory_utilization": flags["gpu-memory-utilization"],
            "max_model_len": longest,
            **({"devices": [str(gpu)]} if gpu is not None else {}),
        }

    def _check_nodes(self) -> None:
        """Engines that run already: as many addresses as engines, and what goes on with one that is not restarted."""
        flags, nodes, urls = self.flags, self._nodes, self.flags["vllm-url"]
        if nodes and len(urls) != nodes:
            named = f"and {len(urls)} are named: --vllm-url http://NODE:{flags['vllm-port']} once for each"
            self._wrong_nodes(f"{nodes} engines on other nodes need {nodes} addresses, {named}")
        elif WAYS[self.mode][1] == "restart" and self._urls:
            does = "adapters are swapped in" if self._lora else "weights are broadcast to it"
            flags.note(
                "weight-bridge-mode",
                f"{self.mode} restarts the engine, but the one at {self._urls[0]} was not started here and is left "
                f"running: {does} instead",
            )
        if nodes and self.mode == "shared_vllm":
            flags.note("num-inference-nodes", "memory cannot be shared between nodes, so full weights are broadcast")
        if flags["trainer-rank"]:
            flags.wrong("trainer-rank", "the trainer is one process, rank 0; start it once and leave this out")
        if "world-size" in flags and flags["world-size"] != 1 + nodes:
            flags.wrong("world-size", f"the trainer and {nodes} engines on other nodes are {1 + nodes}")

    def _check_device(self) -> None:
        """A device that there can be."""
        device, seen = self.flags["device"], self.environ.get("CUDA_VISIBLE_DEVICES")
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device or "cuda")
        if match is None:
            self.flags.wrong("device", f"{device!r} is neither cuda, cuda:N nor cpu")
        elif match[1] and seen is not None and int(match[1]) and int(match[1]) >= len(seen.split(",")):
            self.flags.wrong("device", f"{device} is not among CUDA_VISIBLE_DEVICES={seen}")

    def _every(self) -> int:
        """Steps from one publish to the next."""
        if self._each_step:
            return 1
        if self.flags["vllm-restart-interval"] < 1:
            self.flags.wrong("vllm-restart-interval", "it must be at least 1")
        return int(self.flags["vllm-restart-interval"])

    def _sync(self, every: int) -> Json:
        flags, way, nccl = self.flags, self._way, self.mode == "lora_nccl"
        size = 1 + max(1, len(flags["vllm-url"]))
        if nccl and "nccl-world-size" in flags and flags["nccl-world-size"] != size:
            flags.wrong("nccl-world-size", f"the trainer and its engines are {size}; name others by --vllm-url")
        if nccl or self._distributed:
            return {"kind": "broadcast", "every": every, **self._meeting("nccl-init-method" if nccl else "init-method")}
        if way != "shared":
            return {"kind": way, "every": every}
        if flags["single-copy"] or flags["use-cuda-ipc"]:
            flags.note("single-copy" if flags["single-copy"] else "use-cuda-ipc", "sync shared is always one copy")
        bridge = self.running.bridge if self.running else None
        return {"kind": way, **({"bridge": bridge} if bridge else {})}

    def _meeting(self, name: str) -> dict[str, Json]:
        """Host and port of a flag's ``tcp://host:port``, or of the environment where it says env://."""
        method: str = self.flags[name]
        if method == "env://":
            host, port = (self.environ.get(variable, "") for variable in ("MASTER_ADDR", "MASTER_PORT"))
            if not host or not port:
                missing = "MASTER_PORT" if host else "MASTER_ADDR"
                self.flags.wrong(name, f"env:// reads {missing}, which is not set; set it or write tcp://HOST:PORT")
                return {}
            method = f"tcp://{host}:{port}"
        match = re.fullmatch(r"tcp://(.+):(\d+)", method)
        if match is None:
            self.flags.wrong(name, f"{method} is not written as tcp://HOST:PORT")
            return {}
        return {"host": match[1], "port": int(match[2])}

    def _dtype(self) -> Json:
        dtype = self.flags["dtype"]
        if dtype in ("auto", "float16"):
            why = f"{dtype} is bfloat16, in which Atropos' trainer computes: both have one type here"
            self.flags.note("dtype", why)
            return "bfloat16"
        if dtype not in ("bfloat16", "float32"):
            self.flags.wrong("dtype", f"Tandem trains bfloat16 or float32, not {dtype}; name one of them")
        return dtype

    def _loggers(self) -> list[Json]:
        named = {name: self.flags[f"wandb-{name}"] for name in ("project", "group")}
        board = {"kind": "wandb", **{name: value for name, value in named.items() if value is not None}}
        layout = {"kind": LAYOUT, "save_path": self.flags["save-path"]}
        return ["console", *([board] if self.flags["use-wandb"] else []), layout]
