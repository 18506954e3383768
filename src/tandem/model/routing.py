"""Routers of a mixture of experts: which experts a pass chose, how evenly, and passes whose choice is the sampler's.

Engine and trainer round differently, so that now and then they route a token to other experts, which changes its
logprob by far more than rounding. A replayed pass takes the engine's choice: in the router's own forward ``torch.topk``
over all experts gives the experts it is told, with their scores of now. What is made of scores (softmax, sigmoid,
scales) is the model's own, and so is the gradient.

T counts the tokens of a pass, L the model's layers, K the experts of a token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tandem.errors import EngineError

P = ParamSpec("P")
R = TypeVar("R")

OWN = -1
"""In a replayed choice: the router chooses by itself."""
_LAYER = re.compile(r"\.(\d+)\.")


CHOSEN = "tandem_chosen"
"""Attribute of a router: the experts that its last pass chose."""


def _note(router: nn.Module, _: Any, out: Any) -> None:
    """Forward hook of all routers alike: the compiler would make code for each layer that has one of its own."""
    for part in out if isinstance(out, tuple) else ():
        if isinstance(part, Tensor) and not part.is_floating_point():
            setattr(router, CHOSEN, part)


class _TopK(TorchFunctionMode):
    """Within it ``torch.topk`` over all experts gives a choice, and not the largest."""

    def __init__(self, chosen_TK: Tensor, num_experts: int):
        super().__init__()
        self._chosen_TK = chosen_TK
        self._shape = (len(chosen_TK), num_experts)
        self.is_made = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].shape != self._shape:
            return out
        self.is_made = True
        chosen_TK = torch.where(self._chosen_TK == OWN, out.indices, self._chosen_TK.long())
        return torch.return_types.topk((args[0].gather(1, chosen_TK), chosen_TK))


class _Pass:
    """The pass that is computed; on a CUDA device autograd computes layers again in a thread of its own."""

    experts_TLK: Tensor | None = None
    """What it is to choose, int16; None: it chooses by itself."""


_now = _Pass()


def as_now(run: Callable[P, R]) -> Callable[P, R]:
    """``run`` by the choice of now, however late it is called: a layer may be computed again after other passes."""
    experts_TLK = _now.experts_TLK

    def again(*args: P.args, **options: P.kwargs) -> R:
        before, _now.experts_TLK = _now.experts_TLK, experts_TLK
        try:
            return run(*args, **options)
        finally:
            _now.experts_TLK = before

    return again


@dataclass(slots=True, eq=False, weakref_slot=True)
class Routing:
    """The routers of a model by their layers, what they chose last, and what they are to choose."""

    routers: dict[int, nn.Module]
    layers: int
    top_k: int
    num_experts: int
    _logits: dict[int, list[Tensor]] = field(default_factory=dict)
    _keeps: bool = False
    _is_wrapped: bool = False

    def __post_init__(self) -> None:
        for router in self.routers.values():
            router.register_forward_hook(_note)

    @property
    def _chosen(self) -> dict[int, Tensor]:
        """What the last pass chose, (T, K), of each layer whose router tells."""
        return {layer: vars(router)[CHOSEN] for layer, router in self.routers.items() if CHOSEN in vars(router)}

    @property
    def dtype(self) -> type[np.uint8 | np.uint16]:
        """Type in which an engine tells experts."""
        return np.uint8 if self.num_experts <= 256 else np.uint16

    def chosen(self) -> NDArray[Any]:
        """What the last pass chose, (T, L, K); layers without experts have zeros."""
        chosen = self._chosen
        some = next(iter(chosen.values()))
        all_TLK = some.new_zeros((len(some), self.layers, self.top_k))
        for layer, chosen_TK in chosen.items():
            all_TLK[:, layer] = chosen_TK
        return all_TLK.cpu().numpy().astype(self.dtype)

    def load(self) -> Tensor | None:
        """Tokens of each expert in the last pass, (routers, experts); None where routers do not tell."""
        if not (chosen := self._chosen):
            return None
        chosen_RN = torch.stack([chosen_TK.flatten() for chosen_TK in chosen.values()])
        load_RE = torch.zeros(len(chosen_RN), self.num_experts, device=chosen_RN.device)
        return load_RE.scatter_add_(1, chosen_RN, torch.ones_like(chosen_RN, dtype=load_RE.dtype))

    def balance(self) -> None:
        """Have passes with gradients keep the logits that ``balance_loss`` reads."""
        for layer, router in self.routers.items():
            router.register_forward_hook(partial(self._keep, layer))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep(self, layer: int, _: nn.Module, __: Any, out: Any) -> None:
        if self._keeps:
            self._logits.setdefault(layer, []).append(out[0])

    def begin(self) -> None:
        """A pass begins: what is kept from now on is its own."""
        self._logits.clear()
        self._keeps = torch.is_grad_enabled()

    def arrange(self, place_T: Tensor) -> None:
        """Put what batches kept in the order of a packed row: the place of each of its tokens among theirs."""
        self._logits = {layer: [torch.cat(parts)[place_T]] for layer, parts in self._logits.items()}

    def balance_loss(self, causal: Any) -> Tensor:
        """The model's own load-balancing loss of the pass that was begun last, once and before its backward.

        It is transformers' (Switch Transformer, arXiv 2101.03961, equations 4 to 6): num_experts times the sum over
        experts of their share of choices times their mean probability, over the T tokens of all layers.
        """
        logits = tuple(torch.cat(parts) for parts in self._logits.values())
        self._logits.clear()
        self._keeps = False  # a layer that is computed again in backward is not counted again
        function = balance_function(type(causal))
        assert function is not None
        return function(logits, self.num_experts, self.top_k)

    def rows(self, record: bytes) -> NDArray[np.int16]:
        """What an engine told of some tokens, (T, L, K).

        Raises:
            EngineError: it is not of this model.
        """
        values, each = np.frombuffer(record, dtype=self.dtype), self.layers * self.top_k
        if len(values) % each or (len(values) and int(values.max()) >= self.num_experts):
            raise EngineError(
                f"the engine told {len(record)} bytes of experts, which are not those of {self.layers} layers with "
                f"{self.top_k} of {self.num_experts} experts for each token; set router_replay: false"
            )
        return values.reshape(-1, self.layers, self.top_k).astype(np.int16)

    def replay(self, experts_TLK: Tensor | None) -> None:
        """Have passes from now on choose these; None: choose by themselves."""
        _now.experts_TLK = experts_TLK
        if experts_TLK is not None and not self._is_wrapped:
            self._is_wrapped = True
            for layer, router in self.routers.items():
                router.forward = partial(self._replay, layer, router.forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _replay(self, layer: int, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The forward of a layer's router, by the experts that it is told."""
        if _now.experts_TLK is None:
            return forward(*args, **options)
        with _TopK(_now.experts_TLK[:, layer], self.num_experts) as mode:
            out = forward(*args, **options)
        if not mode.is_made:
            raise EngineError(f"layer {layer} chooses its experts otherwise than by torch.topk")
        return out


_OF: WeakKeyDictionary[nn.Module, Routing | None] = WeakKeyDictionary()


def of(causal: Any) -> Routing | None:
    """The routing of a transformers model; None: it has no experts."""
    if causal not in _OF:
        routers, num_experts = dict[int, nn.Module](), 0
        for name, module in causal.named_modules():
            parts = dict(module.named_children())
            router, layer = parts.get("gate", parts.get("router")), _LAYER.search(f"{name}.")
            if "experts" in parts and layer and router is not None and hasattr(router, "top_k"):
                routers[int(layer[1])] = router
                num_experts = next(p.shape[0] for p in parts["experts"].parameters() if p.dim() == 3)
        layers = causal.config.get_text_config().num_hidden_layers
        top_k: Any = next((router.top_k for router in routers.values()), 0)
        _OF[causal] = Routing(routers, layers, top_k, num_experts) if routers else None
    return _OF[causal]


def balance_function(model: type) -> Callable[..., Tensor] | None:
    """The load-balancing loss beside a class of transformers' models; None: it has none."""
    return getattr(sys.modules[model.__module__], "load_balancing_loss_func", None)
