"""Memory of one forward and backward pass, found by running it on fake tensors.

The model's own modules run, with Tandem's attention, logprobs and adapters, on fake tensors: shapes, types and
lifetimes are those of the real pass, and no weight is read or allocated. Layers that are alike take alike, so two of
each kind are run and the rest are added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.config.loading import RunConfig
from tandem.types import Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from tandem.model.penalties import TokenHistory
    from tandem.model.policy import Policy
    from tandem.trainer.memory_plan.live import LiveTensors

_RUN = 3
"""Layers of each kind that are run: a first one, which may make what all share, one that is looked at, and one more so
that another layer begins after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Segments of the fullest micro-batch that a run may have."""

    lengths: tuple[int, ...]
    """Tokens of each segment: a prompt, then the answers that share it, then the next prompt."""
    parents: tuple[int | None, ...]
    """The prompt that each answer continues."""
    trained: int
    """Tokens that are trained."""

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(self.lengths)

    @classmethod
    def of(cls, *, tokens: int, prompt: int, answer: int, siblings: int) -> Layout:
        """As many whole answers as there is room for, and at least one.

        Args:
            tokens: most that are computed.
            prompt: tokens of a prompt.
            answer: tokens of an answer, the last of which is trained but never computed.
            siblings: answers that share a prompt.
        """
        lengths: list[int] = []
        parents: list[int | None] = []
        trained = group = 0
        while True:
            fresh = trained // answer % siblings == 0
            if lengths and sum(lengths) + answer - 1 + fresh * prompt > tokens:
                break
            if fresh:
                group = len(lengths)
                lengths.append(prompt)
                parents.append(None)
            if answer > 1:
                lengths.append(answer - 1)
                parents.append(group)
            trained += answer
        return cls(lengths=tuple(lengths), parents=tuple(parents), trained=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Peak bytes of a forward and backward pass, beside weights and what the optimizer keeps."""

    activations: int
    """What forward kept for backward."""
    logits: int
    """Tiles of logits, and what goes with them."""
    gradients: int
    """Gradients of weights and activations on their way."""

    @property
    def total(self) -> int:
        """Of all of it."""
        return self.activations + self.logits + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameter counts of a model as it is trained."""

    parameters: int
    """Numbers in its weights, tied ones once."""
    trainable: int
    """Those that are trained."""
    largest: int
    """Those of the largest trained tensor."""
    base: int
    """Those that an engine lends: all but an adapter's."""
    kept: int
    """Bytes of frozen weights kept beside those that are sampled from, where these are."""
    kept_on_host: int
    """Bytes of them that are kept on the host."""
    layer: int
    """Numbers in its largest layer."""
    outside: int
    """Those outside the layers: embeddings, the last norm and the head."""


_PASSES: dict[tuple[Any, ...], Pass] = {}
"""Passes that were run, by all that they depend on."""


class FakeModel:
    """A recipe's model on fake tensors, ready to be counted and run."""

    def __init__(self, config: RunConfig, model_config: Any, *, on_host: bool):
        """Build it as the run will: ``trainable`` prepares it, and where it goes decides how attention is computed.

        Raises:
            ConfigError: an option of ``trainable`` names what the model does not have.
        """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers import AutoModelForCausalLM

        from tandem.model.attention import NAME

        self._key = (model_config.to_json_string(use_diff=False), repr(config.trainable), config.dtype, on_host)
        dtype = getattr(torch, config.dtype)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, attn_implementation=NAME, dtype=dtype)
            self.model: nn.Module = config.trainable.prepare(model).eval()
        self.counts = self._counted(config, on_host)
        self._left, self._more = _thinned(self.model)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Without CUDA in the build a fake tensor cannot be there; a CPU's attention takes somewhat more.
        place = "cuda" if not on_host and torch.cuda.is_available() else "cpu"
        with self._mode:
            base = {id(parameter) for parameter in config.trainable.base_names(self.model).values()}
            _move(self.model, torch.device(place), lambda p: p.dtype if id(p) in base else dtype)

    def _counted(self, config: RunConfig, on_host: bool) -> Counts:
        trained = [p.numel() for p in self.model.parameters() if p.requires_grad]
        kept = config.trainable.kept_bytes(self.model, on_host=on_host)
        parameters = sum(p.numel() for p in self.model.parameters())
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(self.model)]
        return Counts(
            parameters=parameters,
            trainable=sum(trained),
            largest=max(trained),
            base=sum(p.numel() for p in config.trainable.base_names(self.model).values()),
            kept=kept,
            kept_on_host=config.trainable.kept_bytes(self.model, on_host=True) - kept,
            layer=max(layers, default=0),
            outside=parameters - sum(layers),
        )

    def run(self, config: RunConfig, layout: Layout) -> Pass:
        """One micro-batch's forward and backward, with the recipe's checkpointing. Nothing is compiled for it.

        What this process found once for the same model and micro-batch is not looked for again: it takes a second.
        """
        key = (*self._key, repr(config.sampling), config.checkpointing, layout)
        if key not in _PASSES:
            _PASSES[key] = self._run(config, layout)
        return _PASSES[key]

    def _run(self, config: RunConfig, layout: Layout) -> Pass:
        from tandem.model.layers import tune

        for layer in self._left:
            layer.__dict__.pop("forward", None)  # an earlier run's checkpointing
        tune(self.model, compile=False, checkpointing=config.checkpointing)
        with self._mode:
            return run(self.model, config, layout, self._left, self._more)


def run(
    model: nn.Module,
    config: RunConfig,
    layout: Layout,
    left: Iterable[nn.Module] = (),
    more: Mapping[nn.Module, int] | None = None,
) -> Pass:
    """A forward and backward as a training step does them, on real tensors or fake ones.

    Args:
        model: as ``trainable`` prepared it.
        config: its sampling limits decide how logprobs are computed.
        layout: the micro-batch.
        left: its layers, where some were taken out.
        more: how many were, like each of these.
    """
    import torch

    from tandem.model.attention import Packed, sequential_positions
    from tandem.model.logprobs import token_logprobs
    from tandem.model.policy import Policy
    from tandem.trainer.memory_plan.live import LiveTensors

    policy = Policy(model, None, name="", compute=None)  # type: ignore[arg-type]
    plan = Packed(lengths=layout.lengths, parents=layout.parents)
    device = policy.device
    ids_T = torch.zeros(layout.tokens, dtype=torch.int64, device=device)
    positions_T = torch.as_tensor(sequential_positions(plan)).to(device)
    predict_N = torch.arange(layout.trained, device=device) % layout.tokens
    temperature_N = torch.ones(layout.trained, device=device)
    history = _history(config.sampling, layout, device)
    before = () if history is None else (*history.seen, *history.output, history.age_N1)
    live = LiveTensors([*model.parameters(), *model.buffers(), ids_T, positions_T, predict_N, temperature_N, *before])
    live.kind = lambda nbytes: _kind(live.stage, nbytes == policy.head.weight.nbytes)
    watched = _Watched(policy, live, left)
    with live, watched:
        live.stage = "activations"
        hidden_TH = policy.hidden(ids_T[None], positions_T[None], plan)[0]
        hidden_NH = hidden_TH.index_select(0, predict_N)
        live.stage = "logits"
        logprobs_N, _ = token_logprobs(
            hidden_NH,
            policy.head.weight,
            predict_N,
            temperature_N,
            bias=policy.head.bias,
            min_p=_narrow(config.sampling),
            history=history,
            entropy=True,
        )
        hidden_NH.register_hook(watched.enter("backward"))
        del hidden_TH, hidden_NH  # a step has left the function that made them
        logprobs_N.sum().backward()
    further = sum(watched.kept[layer] * number for layer, number in (more or {}).items())
    return _peak(live.peaks, further)


def _narrow(sampling: Sampling) -> float:
    """A min_p that takes what any limit of the support takes; where top_p or top_k end only real logits tell."""
    return 0.5 if sampling.top_p < 1 or sampling.top_k or sampling.min_p else 0.0


def _history(sampling: Sampling, layout: Layout, device: torch.device) -> TokenHistory | None:
    """Penalties of tokens that are all different, which is the most that there can be before them."""
    import torch

    from tandem.model.penalties import Penalties, TokenHistory

    penalties = Penalties.of(sampling, (0,))
    if penalties is None:
        return None
    seen_E = torch.zeros(layout.tokens + layout.trained, dtype=torch.int64, device=device)
    generated_E = torch.zeros(layout.trained, dtype=torch.int64, device=device)
    return TokenHistory.of(penalties, [seen_E] * 3 + [generated_E] * 4)


def _kind(stage: str, as_head: bool) -> str:
    """What a tensor made in a stage is for; ``as_head``: it is as large as the head's weight, so its gradient."""
    return "gradients" if stage in ("backward", "end") or (stage == "logits" and as_head) else stage


def _peak(peaks: Mapping[str, Mapping[str, int]], further: int) -> Pass:
    """The largest stage. Activations of further layers are there until the last layer's backward is over."""
    stages = [
        Pass(
            activations=by.get("activations", 0) + (further if stage != "end" else 0),
            logits=by.get("logits", 0),
            gradients=by.get("gradients", 0),
        )
        for stage, by in peaks.items()
    ]
    return max(stages, key=lambda one: one.total)


class _Watched:
    """Hooks on a model for the time of one pass, which hand gradients over as a training step's do."""

    def __init__(self, policy: Policy, live: LiveTensors, layers: Iterable[nn.Module]):
        self._layers = layers
        self.kept: dict[nn.Module, int] = {}
        """Bytes that the forward of each of ``layers`` but the last left."""
        self._current: nn.Module | None = None
        self._before = 0
        self._live = live
        self._policy = policy
        self._hooks: list[RemovableHandle] = []

    def enter(self, stage: str) -> Callable[[Tensor], None]:
        """A hook that says what goes on from here."""

        def hook(_: Tensor) -> None:
            self._live.stage = stage

        return hook

    def __enter__(self) -> None:
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._begun))
        embedding = self._policy.causal.get_input_embeddings()
        self._hooks.append(embedding.register_forward_hook(self._embedded))
        for parameter in self._policy.model.parameters():
            if parameter.requires_grad:
                # The optimizer's line has the buffer that it is added to.
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_drop))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begun(self, layer: nn.Module, _: object) -> None:
        # Not at its end: what it was given is then still held by its caller.
        if self._current is not None:
            self.kept[self._current] = self._live.total - self._before
        self._current, self._before = layer, self._live.total

    def _embedded(self, _: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self.enter("end"))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _layers(model: nn.Module) -> nn.ModuleList:
    """The transformer's layers; empty where they are in no list of their own."""
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in module):
            return module
    return nn.ModuleList()


def _thinned(model: nn.Module) -> tuple[list[nn.Module], dict[nn.Module, int]]:
    """Take layers out of which enough are left that are alike.

    Returns those left, and how many went of each kind, by the second one left of it.
    """
    every = _layers(model)
    causal: Any = getattr(model, "get_base_model", lambda: model)()
    kinds: dict[Hashable, list[nn.Module]] = {}
    differentiable: bool = causal.get_input_embeddings().weight.requires_grad
    for layer in every:
        kinds.setdefault((differentiable, _traits(layer)), []).append(layer)
        differentiable = differentiable or any(p.requires_grad for p in layer.parameters())
    gone = [layer for alike in kinds.values() for layer in alike[_RUN:]]
    for index in reversed([i for i, layer in enumerate(every) if layer in gone]):
        del every[index]
    return list(every), {alike[1]: len(alike) - _RUN for alike in kinds.values() if len(alike) > _RUN}


def _move(model: nn.Module, device: torch.device, dtype_of: Callable[[nn.Parameter], torch.dtype]) -> None:
    """Put empty tensors in the place of a model's own, tied ones once. On "meta" adapters have not their real type."""
    import torch
    from torch import nn

    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                empty = torch.empty_like(parameter, device=device, dtype=dtype_of(parameter))
                moved[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad), parameter
            if parameter is not None:
                module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _traits(layer: nn.Module) -> Hashable:
    """What decides how much a layer takes."""
    parts = ((name, type(part).__name__, getattr(part, "sliding_window", None)) for name, part in layer.named_modules())
    return tuple(parts), tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
