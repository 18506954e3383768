"""Tiny random models of transformers' real modelling code, with the options that published checkpoints set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_HEAD = {"head_dim": 32}
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_MLA = {
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DELTA = {
    **_HEAD,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {
        **_HEAD,
        "attention_chunk_size": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "mistral": {**_HEAD, "sliding_window": 16},
    "ministral3": _HEAD,
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_MOE},
    "qwen3_next": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "gemma": _HEAD,
    "gemma2": {**_HEAD, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD, "sliding_window": 16, "layer_types": _MIXED},
    "gemma3n_text": {
        **_HEAD,
        "sliding_window": 16,
        "layer_types": [*_MIXED, "sliding_attention", "full_attention"],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "laurel_rank": 4,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **_HEAD,
        "global_head_dim": 32,
        "sliding_window": 16,
        "layer_types": _MIXED,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {"sliding_window": 16},
    "phimoe": {"num_local_experts": 4},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 6.0},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "logits_scaling": 8.0,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": _MIXED},
    "olmo_hybrid": {k: v for k, v in _DELTA.items() if k != "head_dim"},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": {**_HEAD, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_MLA, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_MLA, **_ROUTED, "index_topk": 16, "index_head_dim": 128, "index_n_heads": 2},
    "gpt_oss": {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v2": {**_MLA, **_ROUTED, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "deepseek_v3": {**_MLA, **_ROUTED, "topk_method": "noaux_tc", "first_k_dense_replace": 1},
    "kimi_linear": {
        **_MOE,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "lfm2": {"conv_dim": 64, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.0195},
    "falcon_mamba": {"state_size": 8},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "nemotron": {},
    "nemotron_h": {
        **_HEAD,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    },
    "minimax": {**_HEAD, "num_local_experts": 4, "block_size": 16},
    "minimax_m2": {
        **_HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
    },
    "smollm3": {},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {**_HEAD, "logit_scale": 0.25, "sliding_window": 16, "layer_types": _MIXED},
    "ernie4_5": _HEAD,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "starcoder2": {"sliding_window": 16},
    "stablelm": {},
    "persimmon": {},
    "phi": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 4, "n_head": 2},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 2, "max_seq_len": 256},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "seed_oss": _HEAD,
    "exaone4": {**_HEAD, "sliding_window": 16, "layer_types": _MIXED},
    "apertus": _HEAD,
    "dots1": {**_HEAD, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "arcee": _HEAD,
    "helium": _HEAD,
    "olmo": {},
    "internlm3": _HEAD,
    "gemma3": {
        "text_config": {**SIZES, **_HEAD, "sliding_window": 16, "layer_types": _MIXED},
        "vision_config": {**_VISION, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 1,
    },
    "mistral3": {
        "text_config": {**SIZES, **_HEAD, "model_type": "mistral"},
        "vision_config": {**_VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    },
    "qwen2_5_vl": {"text_config": {**SIZES, "rope_parameters": _ROPE}, "vision_config": _QWEN_VISION},
    "qwen3_vl": {
        "text_config": {**SIZES, **_HEAD, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
}
"""Options by the name of the model type, beside ``SIZES``."""


def config_of(name: str) -> Any:
    """The configuration of a family's tiny model."""
    options = FAMILIES[name]
    config = AutoConfig.for_model(name, **(options if "text_config" in options else {**SIZES, **options}))
    config.get_text_config().initializer_range = 0.1  # wide enough that tokens differ in probability
    return config


def cells(page: str) -> dict[str, str]:
    """The page's column of vLLM, by family."""
    return dict(re.findall(r"^\| `(\w+)` (?:\|[^|]*){4}\| ([\w-]+) \|", page, re.MULTILINE))
