"""Command lines of the documents of Atropos' example trainer, as they are written there, and how they are said here.

They are of its README in its versions (the newest of 2026-03-13, older ones by date) and of its script that runs three
modes. Left out are engines on several GPUs, and lines with an ellipsis.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

HERMES = "NousResearch/Hermes-3-Llama-3.1-8B"

BROKERS = ["run-api", "run-api --port 8002", "python -m atroposlib.cli.run_api > api.log 2>&1 &"]

ENGINES = {
    "newest, LoRA": f"""
        python -m example_trainer.vllm_api_server --model {HERMES} --port 9001 --gpu-memory-utilization 0.5
            --max-model-len 4096 --dtype bfloat16 --enable-lora --enforce-eager""",
    "newest, shared": f"""
        VLLM_ENABLE_SHARED_WEIGHTS=1 LOGDIR=/tmp/grpo_training
        python -m example_trainer.vllm_api_server --model {HERMES} --port 9001 --gpu-memory-utilization 0.45
            --enforce-eager""",
    "newest, FAQ": f"VLLM_USE_V1=0 python -m example_trainer.vllm_api_server --model {HERMES}",
    "newest, eager": f"python vllm_api_server.py --model {HERMES} --enforce-eager",
    "script, shared": f"""
        env CUDA_VISIBLE_DEVICES=0 VLLM_ENABLE_SHARED_WEIGHTS=1 LOGDIR=/tmp/bridge
        python3 -m example_trainer.vllm_api_server --model {HERMES} --port 9001 --gpu-memory-utilization 0.60
            --max-model-len 4096 --dtype bfloat16""",
    "script, distillation's student": """
        env CUDA_VISIBLE_DEVICES=0 VLLM_ENABLE_SHARED_WEIGHTS=1 LOGDIR=/tmp/bridge
        python3 -m example_trainer.vllm_api_server --model Qwen/Qwen3-4B --port 9001 --tensor-parallel-size 1
            --gpu-memory-utilization 0.60 --max-model-len 16384 --dtype bfloat16""",
    "2025-12": """
        python example_trainer/vllm_api_server.py --model Qwen/Qwen2.5-3B-Instruct --port 9001
            --gpu-memory-utilization 0.30 > vllm.log 2>&1 &""",
    "2026-01-17": """
        CUDA_VISIBLE_DEVICES=0 python -u example_trainer/vllm_api_server.py --model Qwen/Qwen2.5-14B-Instruct
            --tensor-parallel-size 1 --port 9001 > vllm.log 2>&1 &""",
    "2026-01-19": """
        LOGDIR=/tmp/logs python -u example_trainer/vllm_api_server.py --model Qwen/Qwen2.5-3B-Instruct --port 9001
            --dtype bfloat16 --gpu-memory-utilization 0.4 --enable-lora --max-lora-rank 32 --enforce-eager
            > /tmp/logs/vllm_lora.log 2>&1 &""",
}

ENVIRONMENTS = {
    "newest": f"""
        python environments/gsm8k_server.py serve --env.group_size 4 --env.batch_size 16 --env.total_steps 200
            --env.steps_per_eval 50 --env.max_num_workers_per_node 8
            --env.rollout_server_url "http://localhost:8002" --env.use_wandb true
            --env.wandb_name "gsm8k-lora-only-env" --openai.api_key "dummy"
            --openai.base_url "http://localhost:9001/v1" --openai.model_name "{HERMES}" --openai.server_type vllm""",
    "newest, order of starting": f"""
        python environments/gsm8k_server.py serve --env.group_size 4 --env.batch_size 16 --env.total_steps 200
            --env.steps_per_eval 50 --env.max_num_workers_per_node 8
            --env.rollout_server_url "http://localhost:8002" --env.use_wandb true --env.wandb_name "gsm8k-train-env"
            --openai.base_url "http://localhost:9001/v1" --openai.model_name "{HERMES}" --openai.server_type vllm""",
    "script": f"""
        python3 environments/gsm8k_server.py serve --env.group_size 4 --env.batch_size 16 --env.total_steps 200
            --env.steps_per_eval 50 --env.max_num_workers_per_node 8 --env.max_token_length 4096
            --env.rollout_server_url "http://localhost:8002" --env.use_wandb true --env.wandb_name gsm8k-shared-vllm-env
            --openai.api_key "dummy" --openai.base_url "http://localhost:9001/v1" --openai.model_name {HERMES}
            --openai.server_type vllm""",
    "2025-12": "python environments/gsm8k_server.py serve --slurm False",
    "2025-12, in the background": """
        python environments/gsm8k_server.py serve --slurm False --openai.model_name Qwen/Qwen2.5-3B-Instruct
            --openai.base_url http://localhost:9001/v1 --openai.server_type vllm
            --env.tokenizer_name Qwen/Qwen2.5-3B-Instruct > gsm8k.log 2>&1 &""",
    "2026-01-17": """
        python environments/gsm8k_server.py serve --slurm False --openai.model_name Qwen/Qwen2.5-14B-Instruct
            --openai.base_url http://localhost:9001/v1 --openai.server_type vllm --openai.api_key x
            --env.tokenizer_name Qwen/Qwen2.5-14B-Instruct --env.use_wandb False > gsm8k.log 2>&1 &""",
    "2026-01-22": """
        python -u environments/gsm8k_server.py serve --env.tokenizer_name Qwen/Qwen2.5-3B-Instruct
            --env.use_wandb=False --env.rollout_server_url http://localhost:8001
            --openai.model_name Qwen/Qwen2.5-3B-Instruct --openai.base_url http://localhost:9001/v1
            --openai.server_type vllm --slurm false""",
}

_SCRIPT = f"""
    python3 -m example_trainer.grpo --model-name {HERMES} --training-steps 30 --batch-size 4
        --gradient-accumulation-steps 4 --warmup-steps 5 --lr 1e-5 --clip-eps 0.2 --use-wandb
        --wandb-project gsm8k-grpo-smoke --wandb-group gsm8k-20260313"""

TRAINERS = {
    "newest, lora_only": f"""
        python -m example_trainer.grpo --model-name {HERMES} --weight-bridge-mode lora_only --vllm-port 9001
            --atropos-url "http://localhost:8002" --batch-size 4 --gradient-accumulation-steps 4 --warmup-steps 20
            --lr 1e-5 --training-steps 30 --clip-eps 0.2 --vllm-restart-interval 5 --save-path ./lora_checkpoints
            --wandb-project "grpo-training" """,
    "newest, shared_vllm": f"""
        python -m example_trainer.grpo --model-name {HERMES} --weight-bridge-mode shared_vllm --vllm-port 9001
            --vllm-config-path /tmp/grpo_training/vllm_bridge_config.json --atropos-url "http://localhost:8002"
            --warmup-steps 20 --clip-eps 0.2""",
    "newest, launcher": f"""
        VLLM_ENABLE_SHARED_WEIGHTS=1 python -m example_trainer.run --model-name {HERMES}
            --atropos-url "http://localhost:8002" --training-steps 30""",
    "newest, W&B": f"""
        atropos-grpo --model {HERMES} --use-wandb --wandb-project "my-grpo-training"
            --wandb-group "hermes-8b-gsm8k" """,
    "newest, out of memory": f"""
        atropos-grpo --model {HERMES} --gpu-memory-utilization 0.4 --batch-size 2 --gradient-accumulation-steps 8
            --seq-len 1024 --optimizer adafactor""",
    "script, shared_vllm": f"""
        env CUDA_VISIBLE_DEVICES=0 {_SCRIPT} --weight-bridge-mode shared_vllm --device cuda:0
            --save-path /tmp/saves --vllm-port 9001 --vllm-config-path /tmp/bridge/vllm_bridge_config.json
            --atropos-url "http://localhost:8002" --train-layer-indices 0-3""",
    "script, lora_only": f"""
        env CUDA_VISIBLE_DEVICES=1 {_SCRIPT} --weight-bridge-mode lora_only --device cuda:0 --save-path /tmp/saves
            --vllm-port 9002 --atropos-url "http://localhost:8003" --lora-r 16 --lora-alpha 32 --lora-dropout 0.05
            --lora-target-modules q_proj v_proj --lora-layer-indices 0-3""",
    "script, lora_restart": f"""
        env CUDA_VISIBLE_DEVICES=3 {_SCRIPT} --weight-bridge-mode lora_restart --device cuda:0 --save-path /tmp/saves
            --vllm-port 9003 --vllm-gpu 4 --vllm-restart-interval 3 --atropos-url "http://localhost:8004" --lora-r 16
            --lora-alpha 32 --lora-dropout 0.05 --lora-target-modules q_proj v_proj --lora-layer-indices 0-3""",
    "2025-12, mode 1": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode none
            --training-steps 100 --vllm-restart-interval 10 --batch-size 2 --gradient-accumulation-steps 16 --lr 1e-5
            --use-wandb --wandb-project gsm8k-grpo""",
    "2025-12, mode 2": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode shared_vllm
            --trainer-rank 0 --world-size 1 --num-inference-nodes 0 --training-steps 100 --batch-size 2
            --gradient-accumulation-steps 16 --lr 1e-5 --use-wandb --wandb-project gsm8k-grpo-shared""",
    "2025-12, mode 3": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only
            --lora-r 16 --lora-alpha 32 --lora-dropout 0.05 --lora-target-modules q_proj v_proj --training-steps 100
            --vllm-restart-interval 20 --batch-size 2 --gradient-accumulation-steps 16 --lr 1e-4 --use-wandb
            --wandb-project gsm8k-grpo-lora""",
    "2025-12, quick test": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-0.5B-Instruct --training-steps 5 --batch-size 1
            --gradient-accumulation-steps 4""",
    "2025-12, LoRA, long": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only --lora-r 32
            --lora-alpha 64 --training-steps 500 --batch-size 2 --gradient-accumulation-steps 32 --lr 5e-5 --use-wandb
            --wandb-project gsm8k-lora""",
    "2025-12, shared, long": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode shared_vllm
            --training-steps 1000 --batch-size 4 --gradient-accumulation-steps 16 --lr 1e-5 --use-wandb
            --wandb-project gsm8k-shared""",
    "2025-12, legacy": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode none
            --training-steps 100 --vllm-restart-interval 10 --vllm-port 9001 --vllm-gpu-memory-utilization 0.30
            --batch-size 2 --gradient-accumulation-steps 16 --lr 1e-5 --save-path checkpoints_legacy --use-wandb
            --wandb-project gsm8k-grpo > trainer.log 2>&1 &""",
    "2025-12, shared memory": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode shared_vllm
            --use-shared-memory --num-inference-nodes 0 --training-steps 100 --vllm-port 9001 --batch-size 2
            --gradient-accumulation-steps 16 --lr 1e-5 --save-path checkpoints_shared > trainer.log 2>&1 &""",
    "2026-01-13": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode none
            --training-steps 100 --vllm-restart-interval 10 --batch-size 2 --lr 1e-5""",
    "2026-01-13, LoRA": """
        python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only
            --training-steps 5 --batch-size 1""",
    "2026-01-13, single copy": """
        CUDA_VISIBLE_DEVICES=0,1 python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-14B-Instruct
            --weight-bridge-mode shared_vllm --single-copy --training-steps 100 2>&1 | tee trainer.log""",
    "2026-01-17": """
        CUDA_VISIBLE_DEVICES=0 LOGDIR=. python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-14B-Instruct
            --weight-bridge-mode shared_vllm --training-steps 100 2>&1 | tee trainer.log""",
    "2026-01-19": """
        CUDA_VISIBLE_DEVICES=0 python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct
            --weight-bridge-mode none --vllm-port 9001 --training-steps 100 --vllm-restart-interval 10 --batch-size 2
            --lr 1e-5 --save-path /tmp/logs/checkpoints_legacy --benchmark 2>&1 | tee /tmp/logs/trainer_legacy.log""",
    "2026-01-22": """
        CUDA_VISIBLE_DEVICES=0 python -m example_trainer.grpo --model-name Qwen/Qwen2.5-3B-Instruct
            --weight-bridge-mode shared_vllm --vllm-port 9001 --vllm-config-path /tmp/logs/vllm_bridge_config.json
            --atropos-url http://localhost:8000 --training-steps 20 --batch-size 2
            --save-path /tmp/logs/checkpoints_shared --benchmark""",
    "2026-02-11, lora_nccl": """
        CUDA_VISIBLE_DEVICES=0 python -m example_trainer.grpo --model-name Qwen/Qwen2.5-3B-Instruct
            --weight-bridge-mode lora_nccl --vllm-port 9001 --atropos-url http://localhost:8000 --lora-r 16
            --lora-alpha 32 --training-steps 50 --nccl-init-method "tcp://localhost:29500" --nccl-world-size 2
            --nccl-sync-every-step --benchmark""",
    "2026-02-24, no penalty": f"""
        python -m example_trainer.grpo --model-name {HERMES} --weight-bridge-mode shared_vllm --vllm-port 9001
            --vllm-config-path /tmp/grpo_training/vllm_bridge_config.json --atropos-url "http://localhost:8002"
            --warmup-steps 20 --kl-coef 0.0 --clip-eps 0.2""",
}

REFUSED = {
    "2026-02-03, a penalty": (
        f"python -m example_trainer.grpo --model-name {HERMES} --kl-coef 0.1 --clip-eps 0.2",
        "--kl-coef: it cannot be 0.1 here: no loss has a penalty on the distance to the weights that sampled",
    ),
    "script, distillation": (
        "python3 -m example_trainer.grpo --model-name Qwen/Qwen3-4B --distill-enabled --distill-coef 0.2",
        "--distill-enabled: it cannot be true here: no loss reads a teacher's",
    ),
    "newest, a teacher": (
        f"""python environments/gsm8k_server_teacher_distill.py serve --env.teacher_enabled true
            --teacher.base_url "http://localhost:9003/v1" --teacher.model_name {HERMES} --teacher.server_type vllm
            --env.teacher_top_k 8 --openai.model_name {HERMES}""",
        "--env.teacher_enabled: it cannot be true here: no loss reads a teacher's logprobs",
    ),
}
"""What asks for another objective than there is, and why it is refused."""

_VERBS = {
    "example_trainer.grpo": ["atropos-grpo"],
    "example_trainer.run": ["atropos-grpo-run"],
    "example_trainer.vllm_api_server": ["atropos-server"],
    "atroposlib.cli.run_api": ["run-api"],
    "environments.gsm8k_server": ["env", "gsm8k"],
    "environments.gsm8k_server_teacher_distill": ["env", "gsm8k"],
    "vllm_api_server": ["atropos-server"],
    "run-api": ["run-api"],
    "atropos-grpo": ["atropos-grpo"],
}


@dataclass(frozen=True, slots=True)
class Command:
    """A line of the document."""

    environ: dict[str, str]
    """Variables that it sets."""
    words: list[str]
    """Tandem's verb and the flags as they are written."""


def command(line: str) -> Command:
    """A line with Tandem's verb in place of Atropos' program; where its output goes is left to the shell."""
    words = shlex.split(line)
    ends = [i for i, word in enumerate(words) if word in (">", "2>&1", "|", "&")]
    words = words[: ends[0]] if ends else words
    environ = {}
    while words[0] == "env" or "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ |= {name: value} if value else {}
    while words[0] in ("python", "python3", "-u", "-m"):
        words.pop(0)
    program = words[0].removesuffix(".py").replace("/", ".")
    return Command(environ, [*_VERBS[program], *words[1:]])
