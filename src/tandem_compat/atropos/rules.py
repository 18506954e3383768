"""``tandem atropos-grpo``: the flags of Atropos' trainer as a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tandem.types import Json
from tandem_compat.atropos.options import DTYPES, OPTIMIZERS, TRAINER, WAYS
from tandem_compat.objective import put_groups
from tandem_compat.table import Reader, Translation

DECAY = 0.01
"""Weight decay of Atropos' optimizers of the Adam family: torch's and bitsandbytes' own default."""

LAYOUT = "tandem_compat.atropos.checkpoints:CheckpointLayout"
"""The logger that gives checkpoints Atropos' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that serves already, and is to be used instead of one that would be started."""

    url: str
    """Its address."""
    bridge: str | None = None
    """The file by which it lends its weights; None: it is asked."""


def read(values: Mapping[str, Json]) -> TrainerRecipe:
    """The flags of a command line.

    Raises:
        ConfigError: with every value of another type.
    """
    return TrainerRecipe.of_command_line(TRAINER, values)


class TrainerRecipe(Reader):
    """One command line of the trainer, made a recipe part by part."""

    environ: Mapping[str, str]
    running: RunningEngine | None

    def translation(self, environ: Mapping[str, str], running: RunningEngine | None = None) -> Translation:
        """A recipe that does what the flags ask for.

        Args:
            environ: LOGDIR, NUM_INFERENCE_NODES, MASTER_ADDR, MASTER_PORT and CUDA_VISIBLE_DEVICES are read.
            running: the engine that serves where one would be started.

        Raises:
            ConfigError: with every flag that is wrong, or asks for another objective or result than can be had.
        """
        self.environ, self.running = environ, running
        self.require("model-name", "a Hugging Face id or a folder")
        self.settle_all(self._conditions())
        every = 1 if self._each_step else self["vllm-restart-interval"]
        # Groups wait between two publishes, and in a server's queue: Atropos' environments queue three batches and
        # sample a fourth.
        if lag := every - 1 + (0 if self["env"] else 4):
            self.put("max_lag", lag)
        if self["env"]:
            self.put("evaluate.tasks", 0)
        else:
            self.put("broker", self["atropos-url"])
            self.note("atropos-url", f"groups that are more than {lag} steps old (max_lag) are left out")
        self._batch()
        self.put("advantage", {"kind": "grpo", "std": "population", "eps": 1e-8})
        eps = self["clip-eps"]  # each sequence's mean over its tokens, then the mean over sequences, as Atropos has it
        clips = {"clip_low": eps, "clip_high": eps, "dual_clip": None}
        self.put("loss", {"kind": "grpo", **clips, "reduction": "sequence"})
        self._optimizer()
        self._trainable()
        self._engine()
        self._sync(every)
        self._dtype()
        self.put("checkpoint.every", self["checkpoint-interval"] or self["training-steps"])
        self._loggers()
        self.put("runs", self["log-dir"] or self.environ.get("LOGDIR") or "logs")
        return self.translated(self.device())

    def device(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of ``--device``: empty where that says no more than the default.

        The engine sees the same, and takes the trainer's GPU unless ``--vllm-gpu`` names another.
        """
        device, visible = self["device"] or "cuda", self.environ.get("CUDA_VISIBLE_DEVICES")
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
        index = int(match[1] or 0) if match else 0
        seen = [str(index)] * (index + 1) if visible is None else visible.split(",")
        if match is None or index >= max(1, len(seen)):
            self.wrong("device", f"{device!r} is none of cuda, cuda:N (of CUDA_VISIBLE_DEVICES) and cpu")
            return {}
        if device == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": seen[index].strip()} if index else {}

    def _conditions(self) -> dict[str, bool]:
        """Conditions under which flags count, and whether they hold."""
        return {
            "distill-enabled": self["distill-enabled"],
            "adafactor": self["optimizer"] == "adafactor",
            "an adapter": self._lora,
            "all weights": not self._lora,
            "shared weights": self._way == "shared",
            "shared_vllm": self.mode == "shared_vllm",
            "lora_nccl": self.mode == "lora_nccl",
            "intervals": not self._each_step,
            "nodes": self._distributed,
            "own engine": not (self._urls or self._nodes),
            "a broker": not self["env"],
            "use-wandb": self["use-wandb"],
        }

    @property
    def mode(self) -> str:
        """--weight-bridge-mode."""
        return str(self["weight-bridge-mode"])

    @property
    def _lora(self) -> bool:
        return WAYS[self.mode][0] == "lora"

    @property
    def _urls(self) -> list[str]:
        """Engines that run already."""
        return list(self["vllm-url"]) or ([self.running.url] if self.running else [])

    @cached_property
    def _nodes(self) -> int:
        """Engines on other nodes."""
        if "num-inference-nodes" not in self:
            self.read_words("num-inference-nodes", [self.environ.get("NUM_INFERENCE_NODES", "").strip() or "0"])
        return int(self["num-inference-nodes"])

    @property
    def _way(self) -> str:
        """How weights travel: as the mode says, or as near to it as goes with an engine that is not ours to end."""
        way = WAYS[self.mode][1]
        if way == "restart" and (self._urls or self._nodes):
            return "hotswap" if self._lora else "broadcast"
        if way == "shared" and (self._nodes or self["use-shared-memory"]):
            return "broadcast"
        return way

    @property
    def _distributed(self) -> bool:
        """Whether whole weights are broadcast to other nodes."""
        return self._way == "broadcast" and self.mode != "lora_nccl" and self._nodes > 0

    @property
    def _each_step(self) -> bool:
        """Whether the mode publishes after every step."""
        return self.mode == "shared_vllm" or (self.mode == "lora_nccl" and self["nccl-sync-every-step"])

    def _batch(self) -> None:
        """Groups of a step, of the size that is asked for or else the largest that divides its sequences."""
        batch, steps = self["batch-size"], self["gradient-accumulation-steps"]
        sequences = batch * steps
        usual = next((size for size in range(8, 1, -1) if sequences % size == 0), sequences)
        size = usual if self["group-size"] is None else self["group-size"]
        name = "gradient-accumulation-steps" if self["group-size"] is None else "group-size"
        factors = f"--batch-size {batch} x --gradient-accumulation-steps {steps}"
        put_groups(self, name, size, sequences, factors)
        self.put("micro_batch_tokens", batch * self["seq-len"])
        self.put("sampling.max_tokens", self["seq-len"])

    def _optimizer(self) -> None:
        self.put("optimizer.kind", OPTIMIZERS[self["optimizer"]])
        if self["optimizer"] == "adafactor":
            self.put("optimizer.relative_rate", self["adafactor-scale-parameter"])
        else:
            self.put("optimizer.weight_decay", DECAY)

    def _trainable(self) -> None:
        self.put("trainable.kind", "lora" if self._lora else "full")
        self._layers("lora-layer-indices" if self._lora else "train-layer-indices")
        if not self._lora:
            return
        if dropout := self["lora-dropout"]:
            self.note("lora-dropout", f"{dropout:g} is left out: the policy that is scored must be what sampled")
        modules = re.split(r"[\s,]+", " ".join(self["lora-target-modules"]).strip())
        self.put("trainable.target_modules", "all-linear" if modules == ["all-linear"] else modules)

    def _layers(self, name: str) -> None:
        """Layers of ``0-3,10``, if the flag was given."""
        layers: set[int] = set()
        for piece in self[name].split(",") if self[name] is not None else ():
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
            if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
                self.wrong(name, f"{piece.strip()!r} is neither a layer nor a rising range; write such as 0-3,10")
                return
            layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        if layers:
            self.put("trainable.layers", sorted(layers))

    def _engine(self) -> None:
        self._check_nodes()
        self.put("engine.kind", "vllm")
        if self._urls or self._nodes:
            self.put("engine.urls", self._urls)
            return
        gpu, longest = self["vllm-gpu"], self["max-model-len"]
        if self._way == "shared" and gpu:
            self.wrong("vllm-gpu", "shared weights are on the trainer's GPU; choose it by CUDA_VISIBLE_DEVICES")
        if gpu is not None:
            self.put("engine.devices", [str(gpu)])
        if longest < self["seq-len"]:
            self.note("max-model-len", f"answers end at {longest} tokens, below --seq-len {self['seq-len']}")
        self.put("engine.port", self["vllm-port"])
        if not self["env"]:
            self.put("engine.require_api_key", False)  # environments in other terminals sample from it

    def _check_nodes(self) -> None:
        """Engines that run already: as many addresses as engines, and what goes on with one that is not restarted."""
        nodes, urls = self._nodes, self._urls
        if nodes and len(urls) != nodes:
            named = f"and {len(urls)} are named: --vllm-url http://NODE:{self['vllm-port']} once for each"
            self.wrong("num-inference-nodes", f"{nodes} engines on other nodes need {nodes} addresses, {named}")
        elif WAYS[self.mode][1] == "restart" and self._urls:
            does = "adapters are swapped in" if self._lora else "weights are broadcast to it"
            self.note("weight-bridge-mode", f"the engine at {self._urls[0]} is not ours to restart: {does} instead")
        if nodes and self.mode == "shared_vllm":
            self.note("num-inference-nodes", "memory cannot be shared between nodes, so full weights are broadcast")

    def _sync(self, every: int) -> None:
        way, nccl = self._way, self.mode == "lora_nccl"
        self.put("sync.kind", way)
        if way != "shared":
            self.put("sync.every", every)
        if nccl or self._distributed:
            self._meeting("nccl-init-method" if nccl else "init-method")
        if way == "shared" and self.running and self.running.bridge:
            self.put("sync.bridge", self.running.bridge)

    def _meeting(self, name: str) -> None:
        """Host and port of a flag's ``tcp://host:port``, or of the environment where it says env://."""
        method: str = self[name]
        if method == "env://":
            host, port = (self.environ.get(variable, "") for variable in ("MASTER_ADDR", "MASTER_PORT"))
            method = f"tcp://{host}:{port}"
            if not host or not port:
                self.wrong(name, "env:// reads MASTER_ADDR and MASTER_PORT; set both, or write tcp://HOST:PORT")
                return
        if (match := re.fullmatch(r"tcp://(.+):(\d+)", method)) is None:
            self.wrong(name, f"{method} is not written as tcp://HOST:PORT")
        else:
            self.put("sync.host", match[1])
            self.put("sync.port", int(match[2]))

    def _dtype(self) -> None:
        dtype = self["dtype"]
        self.put("dtype", DTYPES[dtype])
        if dtype != DTYPES[dtype]:
            self.note("dtype", f"{dtype} is bfloat16, in which Atropos' trainer computes: both have one type here")

    def _loggers(self) -> None:
        named = {name: self[f"wandb-{name}"] for name in ("project", "group")}
        board = {"kind": "wandb", **{name: value for name, value in named.items() if value is not None}}
        layout = {"kind": LAYOUT, "save_path": self["save-path"]}
        self.put("loggers", ["console", *([board] if self["use-wandb"] else []), layout])
