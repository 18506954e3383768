"""How a model computes a packed row, chosen by comparing on a small random copy when the model is first met.

As a *tree* what sequences share is computed once, by Tandem's attention. The other ways unfold the row and run
transformers' own forward: by *prefix* what sequences begin with is computed once, *plain* with each of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations import hub_kernels
from transformers.modeling_outputs import BaseModelOutputWithPast

from tandem.errors import ConfigError
from tandem.model import routing, unfolded
from tandem.model.attention import NAME, Packed, Plan, sequential_positions
from tandem.model.context import ContextPacked
from tandem.model.logprobs import LogitEnd

Packing = Literal["auto", "tree", "plain"]

CLOSE = 1e-5
"""Most relative distance of logits and gradients between two right ways: wrong ones are 1e-2 apart and more."""
_MOST_PARAMETERS = 100_000_000
"""Of a copy that is compared, on the host."""
_PREFIX, _TAILS = 12, (7, 10, 15)
"""Tokens that the first two compared sequences share, and those that each of three has alone."""
_LARGEST = {
    "sliding_window": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "index_topk": 8,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
    "depth": 1,
}
"""What is cut in the copy, beside its layers and the widths of its perceptrons."""


class Choice(NamedTuple):
    """How a model is computed."""

    packing: Literal["tree", "prefix", "plain"]
    why: str
    """In words, with the figures."""


def causal_class(config: Any) -> Any:
    """transformers' class that holds the language model of a configuration, and makes it.

    Raises:
        ConfigError: there is none.
    """
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise ConfigError(f"transformers has no causal language model for {type(config).__name__}; use another model")


def attention(config: Any, packing: Packing) -> dict[str, str]:
    """What transformers is told when it makes or loads a model that computes packed rows as chosen."""
    return {"attn_implementation": NAME} if chosen(config, packing).packing == "tree" else {}


def bare(config: Any, *, dtype: torch.dtype, packing: Packing = "auto") -> Any:
    """A model that computes packed rows as chosen, on the meta device: it has no weights."""
    options = attention(config, packing)
    with torch.device("meta"):
        return causal_class(config).from_config(config, dtype=dtype, **options).eval()


def is_tree(causal: Any) -> bool:
    """Whether a model computes packed rows as trees: it was loaded with Tandem's attention."""
    return bool(causal.config.get_text_config()._attn_implementation == NAME)


def backbone(causal: Any) -> Any:
    """The layers of the language model, without what else a model for images has."""
    return next(child for child in causal.children() if isinstance(child, PreTrainedModel)).get_decoder()


def hidden(causal: Any, tokens_BT: Tensor, positions_BT: Tensor, plan: Plan, *, at_once: bool = False) -> Tensor:
    """Last hidden states of packed or decoded tokens, (B, T, hidden size); ``at_once``: by one pass of the model."""
    model, experts = backbone(causal), routing.of(causal)
    if experts is not None:
        experts.begin()
        experts.replay(_experts(plan))
    if is_tree(causal):
        out = model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False, plan=plan)
        return out.last_hidden_state  # type: ignore[no-any-return]
    if not isinstance(plan, Packed):
        raise ConfigError("packing: plain computes whole sequences on one rank; set distributed.context_parallel: 1")
    return unfolded.hidden(model, tokens_BT[0], plan, experts, at_once=at_once)[None]


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """transformers' models as they are in torch, for copies on the host.

    flash-linear-attention, mamba-ssm and causal-conv1d take their place where they are installed, on a GPU alone.
    """
    exporting: Any = vars(hub_kernels)  # what is exported must not call them
    own = exporting["is_torchdynamo_exporting"]
    exporting["is_torchdynamo_exporting"] = lambda: True
    try:
        yield
    finally:
        exporting["is_torchdynamo_exporting"] = own


@torch_alone()
def check_replay(config: Any) -> None:
    """See by a small random copy that a model's experts can be chosen from without.

    Raises:
        ConfigError: they cannot, and why.
    """
    weights: list[Tensor] = []
    why = "it has no router beside its experts"
    model = causal_class(config).from_config(small(config), dtype=torch.float32).eval()
    if (experts := routing.of(model)) is not None:
        choice = np.random.default_rng(0).random((8, experts.layers, experts.num_experts)).argsort(axis=2)
        plan = Packed(lengths=(8,), parents=(None,), experts_TLK=torch.from_numpy(choice[..., : experts.top_k]))
        for router in experts.routers.values():
            router.register_forward_hook(lambda _, __, out: weights.append(out[1]))
        tokens_1T = torch.arange(8)[None]
        try:
            with torch.no_grad():
                hidden(model, tokens_1T, tokens_1T, plan)
        except Exception as error:
            why = " ".join(str(error).split())[:120]
        else:
            if experts.load() is not None and all((of != 0).all() for of in weights):
                return
            why = "its routers do not tell experts, or give those that they would not choose no weight"
    raise ConfigError(f"router_replay: a {config.model_type} model's experts cannot be chosen: {why}; set it to false")


def check_balance(config: Any) -> None:
    """See that a model has routers and a load-balancing loss.

    Raises:
        ConfigError: it has not.
    """
    model = causal_class(config).from_config(small(config), dtype=torch.float32)
    if routing.of(model) is None or routing.balance_function(type(model)) is None:
        raise ConfigError(f"router_aux_loss_coef: a {config.model_type} model has no load-balancing loss; set it to 0")


def _experts(plan: Plan) -> Tensor | None:
    """The experts that a pass is told, of this rank's tokens."""
    if isinstance(plan, Packed):
        return plan.experts_TLK
    if isinstance(plan, ContextPacked) and plan.whole.experts_TLK is not None:
        return plan.whole.experts_TLK[plan.first : plan.first + plan.each]
    return None


class Comparison(NamedTuple):
    """Relative distances of a small copy's logits and gradient from those of one sequence at a time, or what failed."""

    tree: float | str
    prefix: float | str
    plain: float | str
    """Not computed, and 0, where a faster way is right; of ``prefix`` the same."""
    end: LogitEnd | None
    """What the model does to its head's logits."""


_COMPARED: dict[str, Comparison] = {}


def compared(config: Any) -> Comparison:
    """Both ways beside one sequence at a time. Each configuration is compared once in a process.

    Raises:
        ConfigError: its model does not run, or does more to its head's logits than is known here.
    """
    key = json.dumps(_described(config.to_dict()), sort_keys=True, default=str)
    if key not in _COMPARED:
        # On a thread of its own, for which alone OpenMP is told to take no more: several, for such small products and
        # beside engines that start, wait for each other.
        with ThreadPoolExecutor(1) as thread:
            _COMPARED[key] = thread.submit(_compare, config).result(timeout=600)
    return _COMPARED[key]


@torch_alone()
def _compare(config: Any) -> Comparison:
    logged, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)  # transformers' advice is not about this copy
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = causal_class(config).from_config(small(config), dtype=torch.float32).eval()
            try:  # in float64 rounding is far below ``CLOSE``, however deep the model is
                case = Case(copy.deepcopy(model).double())
            except RuntimeError:  # its kernels do not have that
                case = Case(model)
            tree = case.error("tree")
            prefix = 0.0 if _is_close(tree) else case.error("prefix")
            return Comparison(tree, prefix, 0.0 if _is_close(prefix) else case.error("plain"), case.end)
    finally:
        logging.disable(logged)
        torch.set_num_threads(threads)


def _described(part: Any) -> Any:
    """What of a configuration says what is computed."""
    if not isinstance(part, dict):
        return part
    left_out = ("_name_or_path", "dtype", "transformers_version", "architectures")
    return {name: _described(value) for name, value in part.items() if name not in left_out}


def _is_close(error: float | str) -> bool:
    return isinstance(error, float) and error <= CLOSE


def _distance(error: float | str) -> str:
    return error if isinstance(error, str) else f"its logits or gradient are off by {error:.1g}"


def chosen(config: Any, packing: Packing = "auto") -> Choice:
    """How a model of this configuration is computed.

    Raises:
        ConfigError: it cannot be computed right, or not in the way asked for.
    """
    comparison = compared(config)
    tree = _distance(comparison.tree)
    if packing == "tree" and not _is_close(comparison.tree):
        raise ConfigError(f"packing: tree does not fit a {config.model_type} model: {tree}; use auto")
    if packing != "plain" and _is_close(comparison.tree):
        return Choice("tree", f"exact within {comparison.tree:.0e}")
    if packing != "plain" and _is_close(comparison.prefix):
        return Choice("prefix", f"exact within {comparison.prefix:.0e}; as a tree {tree}")
    if not _is_close(comparison.plain):
        off = f"unfolded to rows {_distance(comparison.plain)}, and at most {CLOSE:.0e} is allowed"
        raise ConfigError(f"a {config.model_type} model cannot be trained: {off}; use a model of another architecture")
    if _is_close(comparison.prefix):
        return Choice("plain", "asked for")
    return Choice("plain", f"as a tree {tree}; by prefix {_distance(comparison.prefix)}")


class Case:
    """What a small model computes of three sequences one at a time, and how far other ways are from it."""

    def __init__(self, causal: Any):
        self.causal = causal
        self.own = causal.config.get_text_config()._attn_implementation
        self.head = causal.get_output_embeddings()
        self.parameters = [p for p in causal.parameters() if p.requires_grad]
        vocabulary, width = self.head.weight.shape
        self.end = _end(causal, torch.randn(1, 8, width, dtype=self.head.weight.dtype))
        prefix, *tails = (torch.randint(3, min(vocabulary, 500), (n,)) for n in (_PREFIX, *_TAILS))
        # The gradient is of what one sequence alone has.
        self.slopes = [torch.randn(len(tail), vocabulary, dtype=self.head.weight.dtype) for tail in tails]
        self.segments = [prefix, *tails]
        self.sequences = [torch.cat([prefix, tails[0]]), torch.cat([prefix, tails[1]]), tails[2]]
        whole = [causal(input_ids=tokens[None], use_cache=False).logits[0] for tokens in self.sequences]
        self.logits, self.gradient = self._results(whole)

    def _gradient(self, logits: list[Tensor]) -> Tensor:
        loss = torch.stack([(z * s).sum() for z, s in zip(logits, self.slopes, strict=True)]).sum()
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    def _results(self, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and their gradient, of whole sequences' logits."""
        tails = [z[-n:] for z, n in zip(sequences, _TAILS, strict=True)]
        return torch.cat([sequences[0][:_PREFIX], *tails]).detach(), self._gradient(tails)

    def error(self, way: str) -> float | str:
        """How far a packed row's logits and gradient are, or what failed."""
        parts = self.sequences if way == "plain" else self.segments
        lengths = tuple(map(len, parts))
        plan = Packed(lengths=lengths, parents=(None,) * 3 if way == "plain" else (None, 0, 0, None))
        try:
            self.causal.set_attn_implementation(NAME if way == "tree" else self.own)
            if way == "tree" and not is_tree(self.causal):
                return "its attention is not by transformers' interface"
            positions = torch.as_tensor(sequential_positions(plan))
            logits = self.head(hidden(self.causal, torch.cat(parts)[None], positions[None], plan)[0])
            if self.end is not None:
                logits = self.end(logits)
            z = list(logits.split(lengths))
            whole = z if way == "plain" else [torch.cat([z[0], z[1]]), torch.cat([z[0], z[2]]), z[3]]
            computed, gradient = self._results(whole)
        except Exception as error:
            return f"it fails ({' '.join(str(error).split())[:120] or type(error).__name__})"
        finally:
            self.causal.set_attn_implementation(self.own)
        apart = (computed - self.logits).abs().amax() / self.logits.abs().amax()
        return float(max(apart, (gradient - self.gradient).norm() / self.gradient.norm()).nan_to_num(torch.inf))


class _Output(BaseModelOutputWithPast):
    def __getattr__(self, name: str) -> None:
        return None  # whatever else a model hands on, such as its router's logits


def _end(causal: Any, hidden_1NH: Tensor) -> LogitEnd | None:
    """What the model's own forward does to its head's logits, seen by giving it hidden states.

    Raises:
        ConfigError: it is more than a scale and a cap.
    """
    layers, head = backbone(causal), causal.get_output_embeddings()
    with torch.no_grad():
        hidden_1NH = hidden_1NH * (10 / head(hidden_1NH).abs().amax())  # a cap is seen in large logits alone
        linear = head(hidden_1NH).double()
        layers.forward = lambda *_, **__: _Output(last_hidden_state=hidden_1NH)
        try:
            tokens = torch.zeros(hidden_1NH.shape[:2], dtype=torch.int64)
            own = causal(input_ids=tokens, use_cache=False).logits.double()
        finally:
            del layers.forward
        cap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
        before = own if cap is None else (own / cap).atanh() * cap
        scale = float((before * linear).sum() / (linear * linear).sum())
        end = LogitEnd(1.0 if abs(scale - 1) < 1e-6 else scale, cap)
        apart = float((end(linear) - own).abs().amax() / own.abs().amax())
    if not apart <= CLOSE:
        what = f"the logits of a {causal.config.model_type} model are {apart:.1g} from its head's"
        raise ConfigError(f"{what}, scaled and capped; use another model")
    return None if end == (1.0, None) else end


@torch_alone()
def small(config: Any, layers: int = 1) -> Any:
    """The same with the first layers, up to one of each kind and at least so many, short windows and few hidden units.

    With more units where so few do not run.

    Raises:
        ConfigError: it does not run so.
    """
    auto = causal_class(config)
    config = type(config).from_dict(config.to_dict())  # without the attention that a loaded model has
    failed: Exception | str = f"its small copy has more than {_MOST_PARAMETERS:,} parameters"
    for narrowed in (_few_units, _few_heads, lambda cut: cut):
        try:
            copied = _shallow(narrowed(_cut(config)), layers)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in auto.from_config(copied).parameters())
            if size <= _MOST_PARAMETERS:
                with torch.no_grad():
                    auto.from_config(copied, dtype=torch.float32).eval()(torch.zeros(1, 4, dtype=torch.int64))
                return copied
        except Exception as error:
            failed = error
    raise ConfigError(f"a random {config.model_type} model does not run: {failed}; use another model")


def _few_units(config: Any) -> Any:
    """The same with few hidden units for each head."""
    text = config.get_text_config()
    text.hidden_size = min(text.hidden_size, 8 * text.num_attention_heads)
    return config


def _few_heads(config: Any) -> Any:
    """The same with fewer heads and, in proportion, hidden units."""
    text = config.get_text_config()
    counts = {
        name: value
        for name, value in vars(text).items()
        if name.endswith(("heads", "n_groups")) and isinstance(value, int) and value > 1
    }
    times = math.gcd(text.hidden_size, *counts.values())
    for name, value in [("hidden_size", text.hidden_size), *counts.items()]:
        setattr(text, name, value // times)
    return config


def _cut(config: Any) -> Any:
    """The same with short windows, narrow perceptrons, few words and experts."""
    cut = copy.deepcopy(config)
    for part in filter(None, (cut, cut.get_text_config(), getattr(cut, "vision_config", None))):
        for name, value in list(vars(part).items()):
            most = 64 if "intermediate_size" in name else _LARGEST.get(name)
            if most is not None and isinstance(value, int) and value > most:
                setattr(part, name, most)
            elif most is not None and isinstance(value, list):
                setattr(part, name, [min(each, most) for each in value])
            elif name.endswith("token_id") and isinstance(value, int) and value >= _LARGEST["vocab_size"]:
                setattr(part, name, 0)
    if vision := getattr(cut, "vision_config", None):  # it is made and not computed
        heads: int = getattr(vision, "num_heads", None) or getattr(vision, "num_attention_heads", None) or 16
        vision.hidden_size = min(vision.hidden_size, 8 * heads)
    return cut


def _shallow(config: Any, least: int) -> Any:
    """The same with layers until one of each kind has come, and at least so many."""
    with torch.device("meta"):
        model = backbone(causal_class(config).from_config(config))
    layers: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(layers):
            layers = list(module)
    first: dict[tuple[Any, ...], int] = {}
    for i, layer in enumerate(layers):
        kind = tuple(
            (name, type(module), *(p.shape for p in module._parameters.values() if p is not None), *_traits(module))
            for name, module in layer.named_modules()
        )
        first.setdefault(kind, i)
    shallow = copy.deepcopy(config)
    text, depth = shallow.get_text_config(), min(max(*first.values(), least - 1) + 1, len(layers))
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, name, list(value[:depth]))
    if "num_hidden_layers" in vars(text):
        text.num_hidden_layers = depth
    return shallow


def _traits(module: nn.Module) -> list[tuple[str, Any]]:
    """What a layer's code may ask of itself: whether it has a window, is causal, and so on."""
    public = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [(name, value if isinstance(value, str | bool) else type(value)) for name, value in public]
