"""The command line of Atropos' example trainer: every flag that one of its versions had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.types import Json


@dataclass(frozen=True, kw_only=True)
class TrainerFlags:
    """The command line of Atropos' trainer, and three flags of Tandem's own: env, group_size and vllm_url."""

    model_name: str = field(metadata={"also": ("--model",)})
    """Hugging Face id or a local folder."""
    env: str | None = None
    """Tandem's own: play this environment, such as gsm8k, in the trainer's process instead of using atropos-url."""
    group_size: int | None = None
    """Tandem's own: answers per task; left out: the largest number up to 8 that divides batch-size times
    gradient-accumulation-steps. Groups of a broker may have other sizes."""
    vllm_url: tuple[str, ...] = ()
    """Tandem's own: an engine that runs already, instead of one that is started; once for each."""
    lr: float = 1e-5
    """Learning rate."""
    training_steps: int = 10
    """Optimizer steps."""
    batch_size: int = 2
    """Sequences of one forward and backward."""
    gradient_accumulation_steps: int = 32
    """Forwards and backwards of one optimizer step."""
    seq_len: int = 2048
    """Most tokens of a prompt and its answer together."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises."""
    clip_eps: float = 0.2
    """The probability ratio is clipped to 1 - eps and 1 + eps."""
    kl_coef: float = 0.0
    """Only 0, as in Atropos' trainer since it has no such flag."""
    no_reference_logprobs: bool = False
    """Refused: ratios are to the logprobs of sampling; loss=reinforce has none."""
    distill_enabled: bool = False
    """Refused: no loss reads a teacher's logprobs."""
    distill_coef: float = 1.0
    """Weight of the teacher's term, which there is not."""
    distill_temperature: float = 1.0
    """Temperature of the teacher's term, which there is not."""
    optimizer: str = "adamw"
    """adamw, adamw_8bit, adamw_cpu (states in host memory) or adafactor."""
    adafactor_scale_parameter: bool = False
    """Multiply adafactor's rate by each tensor's root mean square."""
    adafactor_relative_step: bool = False
    """Refused, as by transformers: adafactor would choose the rate, and there is --lr."""
    device: str | None = None
    """cuda, cuda:N (the Nth that CUDA_VISIBLE_DEVICES shows) or cpu; left out: the first GPU, or else the CPU."""
    train_layer_indices: str | None = None
    """Layers to train in full, such as 0-3,10; all of them if it is left out."""
    save_path: str = "trained_model_checkpoints"
    """Folder of step_N/, final_model/ and their like."""
    checkpoint_interval: int = 3
    """Steps between checkpoints; 0 saves the last step alone."""
    weight_bridge_mode: str = "none"
    """none, shared_vllm, lora_only, lora_restart or lora_nccl."""
    single_copy: bool = False
    """One copy of the weights, with shared_vllm; it is always so."""
    vllm_config_path: str | None = None
    """With shared_vllm, the file by which a running engine lends its weights; left out: it is looked for in $LOGDIR,
    the working directory and /tmp/atropos_bridge."""
    use_shared_memory: bool = False
    """With shared_vllm, broadcast weights to an engine on a GPU of its own."""
    use_cuda_ipc: bool = False
    """With shared_vllm, one copy of the weights; it is always so."""
    vllm_port: int = 9001
    """Port of the engine: one that serves there already is used, else it is started there."""
    vllm_restart_interval: int = 3
    """Steps between restarts, swaps or broadcasts, where the mode has one."""
    vllm_gpu: int | None = None
    """Number of the GPU that the engine is started on; left out: the trainer's."""
    gpu_memory_utilization: float = field(default=0.45, metadata={"also": ("--vllm-gpu-memory-utilization",)})
    """Share of the GPU's memory that the engine takes."""
    max_model_len: int = 4096
    """Longest context of the engine."""
    dtype: str = "bfloat16"
    """Type of the weights: bfloat16 or float32; auto and float16 are bfloat16."""
    lora_r: int = 16
    """Rank of the adapter."""
    lora_alpha: int = 32
    """The adapter's output is multiplied by alpha/r."""
    lora_dropout: float = 0.05
    """Left out: the policy that is scored must be the policy that sampled, which dropout would change."""
    lora_target_modules: str = "q_proj v_proj"
    """Linear layers that are adapted, separated by spaces, or all-linear."""
    lora_layer_indices: str | None = None
    """Layers to adapt, such as 0-3,10; all of them if it is left out."""
    nccl_init_method: str = "tcp://localhost:29500"
    """Where trainer and engines meet, with lora_nccl."""
    nccl_world_size: int = 2
    """The trainer and its engines, counted, with lora_nccl."""
    nccl_sync_every_step: bool = field(default=True, metadata={"off": "--no-nccl-sync-every-step"})
    """Broadcast after every step rather than every vllm-restart-interval, with lora_nccl."""
    num_inference_nodes: int = 0
    """Engines on other nodes, named by vllm-url; with shared_vllm the weights are then broadcast."""
    init_method: str = "env://"
    """Where trainer and engines of other nodes meet; env:// reads MASTER_ADDR and MASTER_PORT."""
    trainer_rank: int = 0
    """The trainer is rank 0."""
    world_size: int = 1
    """The trainer and the engines of other nodes, counted."""
    atropos_url: str = "http://localhost:8000"
    """Where a broker hands out scored groups: Atropos' run-api or tandem serve broker."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str | None = None
    """Its project."""
    wandb_group: str | None = None
    """Its group."""
    benchmark: bool = False
    """Print times and memory at the end."""
    debug_loading: bool = False
    """Nothing more is printed: tandem --debug shows an error's traceback."""
    log_dir: str | None = None
    """Folder of the run's folder; left out: $LOGDIR, or else logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposTranslation:
    """What a command line comes to."""

    options: dict[str, Json]
    """The recipe."""
    notes: tuple[str, ...]
    """What a person should know of how it differs from the flags."""
    environ: dict[str, str]
    """Environment variables to set before anything loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that serves already, and is to be used instead of one that would be started."""

    url: str
    """Its address."""
    bridge: str | None = None
    """The file by which it lends its weights; None: it is asked."""


def joined(words: Sequence[str]) -> list[str]:
    """The command line with ``--lora-target-modules a b`` as one value, since a flag here has one."""
    out: list[str] = []
    gathers = False
    for word in words:
        if gathers and not word.startswith("-") and "=" not in word:
            out[-1] = f"{out[-1]} {word}" if out[-1] != "--lora-target-modules" else f"{out[-1]}={word}"
            continue
        gathers = word.partition("=")[0] == "--lora-target-modules"
        out.append(word)
    return out
