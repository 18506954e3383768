"""Supported architectures: those that Tandem's attention computes right, checked before weights are loaded.

A packed row holds many sequences. An architecture is computed right if tokens meet in nothing but attention, and if all
of its attention goes through transformers' interface with what it needs told there.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

COMPUTED = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layer, as configurations name them."""


def refusal(config: Any) -> str | None:
    """Why a model of this (text) configuration would be computed wrongly, in words that follow its name; None if not.

    What is left to be found when the model first runs is an attention with terms of its own, such as learned sinks or a
    mask.
    """
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return f"is of an architecture ({type(config).__name__}) that transformers has no causal language model for"
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - COMPUTED)
    if layers or model_class._is_stateful:
        what = f"layers of kind {', '.join(layers)}" if layers else "recurrent layers"
        return f"mixes tokens by {what}, which cannot tell the sequences of a packed row apart; use another"
    if not model_class._supports_attention_backend:
        return "computes attention by itself, which cannot tell the sequences of a packed row apart; use another"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps the logits of its attention (attn_logit_softcapping), which Tandem does not compute; use another"
    for option in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, option, None) not in (None, 1, 1.0):
            return f"changes its logits by {option}, which Tandem does not compute; use another"
    return None
