"""Whether the processes of a recipe can share the attention heads of its model, asked before weights load."""

from __future__ import annotations

from typing import Any

from tandem.config.loading import RunConfig
from tandem.model.context import CONTEXT_PARALLEL, check_heads


def check_model_heads(config: RunConfig, model_config: Any) -> None:
    """Refuse ranks of a sequence, or an engine's tensor-parallel workers, that cannot share the model's heads.

    A model whose configuration gives no one number of heads is not judged: its engine refuses it itself.

    Args:
        config: the recipe.
        model_config: transformers' configuration of its model.

    Raises:
        ConfigError: names the option and the numbers that would do.
    """
    text = model_config.get_text_config()
    query_heads = getattr(text, "num_attention_heads", None)
    if not isinstance(query_heads, int):
        return
    key_heads = getattr(text, "num_key_value_heads", None) or query_heads
    check_heads(query_heads, key_heads, config.distributed.context_parallel, option=CONTEXT_PARALLEL)
    workers = getattr(config.engine, "tensor_parallel_size", 1)
    check_heads(query_heads, key_heads, workers, option="engine.tensor_parallel_size")
