"""A recipe's model without memory: how many parameters it has, and what a forward pass keeps for each token."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any

from tandem.config.loading import RunConfig


class MetaModel:
    """A model on torch's meta device, as ``trainable`` prepares it."""

    def __init__(self, config: RunConfig, model_config: Any):
        """Build it.

        Raises:
            ConfigError: an option of ``trainable`` names what the model does not have.
        """
        import torch

        from tandem.model import packing

        dtype, trainable = getattr(torch, config.dtype), config.trainable
        self.choice = packing.chosen(model_config, config.packing)
        model = packing.bare(model_config, dtype=dtype, packing=config.packing)
        with torch.device("meta"):
            self._model = model = trainable.prepare(model).eval()
        self._width = dtype.itemsize
        self.layers: int = model_config.get_text_config().num_hidden_layers
        self.adapted = trainable.described(model)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        head = causal.get_output_embeddings().weight
        self.parameters = sum(p.numel() for p in model.parameters())
        """Numbers in its weights, tied ones once."""
        self.trainable = sum(trained)
        """Those that are trained."""
        self.largest = max(trained)
        """Those of the largest trained tensor."""
        self.base = sum(p.numel() for p in trainable.base_names(model).values())
        """Those that an engine lends: all but an adapter's."""
        self.kept = trainable.kept_bytes(model)
        """Bytes of frozen weights kept beside those that are sampled from."""
        self.head = head.numel() if head.requires_grad else 0
        """Numbers in the head's weight if it is trained, else 0."""
        self.tied = head is causal.get_input_embeddings().weight
        """The head's weight is the embedding's."""

    @cached_property
    def token_bytes(self) -> int:
        """What an eager forward pass keeps of each token for its backward pass, with nothing recomputed.

        The model's own modules run once, in bfloat16: mixtures of experts do not run on the meta device in float32,
        in which what is not float32 already takes twice as much. Segments are short, since attention on that device
        keeps its scores.
        """
        import torch
        from torch import Tensor
        from torch._subclasses import FakeTensorMode

        from tandem.model.attention import Packed, sequential_positions
        from tandem.model.policy import Policy

        model = self._model.to(torch.bfloat16)
        policy = Policy(model, None, name="", compute=None)  # type: ignore[arg-type]
        plan = Packed(lengths=(16, 16, 16), parents=(None, 0, 0) if self.choice.packing == "tree" else (None,) * 3)
        weights: set[int] = set()
        saved: dict[int, tuple[Any, int]] = {}  # storages are held, so that no address is given twice

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                times = self._width // 2 if tensor.dtype == torch.bfloat16 else 1
                saved[storage._cdata] = storage, storage.nbytes() * times
            return tensor

        is_tree = self.choice.packing == "tree"
        # transformers' own masks ask a tensor for its values, unless it is a fake one.
        fake = contextlib.nullcontext() if is_tree else FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if not is_tree:
                model.to_empty(device="cpu")
            weights |= {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
            tokens_1T = torch.zeros(1, sum(plan.lengths), dtype=torch.int64, device=policy.device)
            policy.hidden(tokens_1T, torch.as_tensor(sequential_positions(plan), device=policy.device)[None], plan)
        return sum(size for _, size in saved.values()) // sum(plan.lengths)
