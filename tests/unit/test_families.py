"""Families of open models: how each is packed, and that trainer and embedded engine compute what transformers does."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.families import FAMILIES, PAGE, cells, config_of

from tandem.engines.embedded.spec import Embedded
from tandem.errors import ConfigError
from tandem.model import layers, packing
from tandem.model.attention import Packed, sequential_positions
from tandem.model.packing import CLOSE, Case
from tandem.model.policy import Compute, Policy
from tandem.trainable import _merged
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.types import Completion, Sampling

REFUSED = {"glm_moe_dsa"}
"""Of sparse-indexed attention, of which transformers' own batches differ from single sequences."""
NOT_LINEAR = {"gpt2"}
"""Its products are of transformers' Conv1D."""
PROMPTS = [list(range(5, 25)), [7, 9, 11], list(range(5, 25)), list(range(30, 42))]
LENGTHS = (6, 14, 11, 9)
FEW = ("qwen3_5_text", "gpt_oss", "gemma2", "granite", "deepseek_v3", "bamba", "mamba2", "qwen2_5_vl")
"""One of each kind of trouble: delta nets, sinks, caps, scales, latent heads, positions, no positions, images."""


def model_of(name: str, **options: str) -> Any:
    torch.manual_seed(0)
    config = config_of(name)
    return packing.causal_class(config).from_config(config, dtype=torch.float32, **options).eval()


def trained(name: str, trainable: Trainable, way: str, dtype: torch.dtype = torch.float32) -> float:
    """How far the logits of packed sequences, and their gradient in what is trained, are from one at a time."""
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped products have no float64
    model = trainable.prepare(model_of(name, **options).to(dtype))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # where it is 0, so is the gradient of A
                parameter.data += torch.randn_like(parameter) * 0.1
        error = Case(getattr(model, "get_base_model", lambda: model)()).error(way)
    assert isinstance(error, float), error
    return error


def sampled(name: str) -> float:
    """Largest distance of a sampled token's logprob from transformers' own forward of the whole sequence."""
    policy = Policy(
        model_of(name, **packing.attention(config_of(name), "auto")), SimpleNamespace(), name=name, compute=Compute(1)
    )

    async def main() -> list[Completion]:
        async with Embedded(max_rows=3).open(policy, context=128) as engine:
            work = [engine.generate(PROMPTS[i], Sampling(max_tokens=n), i) for i, n in enumerate(LENGTHS)]
            return await asyncio.wait_for(asyncio.gather(*work), 60)

    try:
        answers = asyncio.run(main())
    finally:
        policy.close()
    own, distances = model_of(name), []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = own(input_ids=torch.tensor([[*prompt, *answer.tokens]]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        distances.append(float((torch.tensor(answer.logprobs) - logprobs).abs().max()))
    return max(distances)


@pytest.mark.parametrize("name", FEW)
def test_a_family_is_trained_and_sampled_as_transformers_computes_it(name: str) -> None:
    way = packing.chosen(config_of(name)).packing
    assert max(trained(name, Full(), way), trained(name, Lora(rank=4), way)) < CLOSE
    assert sampled(name) < 1e-3


@pytest.mark.parametrize("name", ["gemma3n_text", "gpt_oss", "bamba"])
def test_layers_that_are_computed_again_have_the_same_gradient(name: str) -> None:
    """Also of a model that adds to a product in place."""
    model, ids = model_of(name), torch.tensor([PROMPTS[0]])
    slopes = torch.randn(1, len(PROMPTS[0]), model.get_output_embeddings().weight.shape[0])
    gradients = []
    for how in ("none", "selective", "full"):
        layers.tune(model, compile=False, checkpointing=how)
        model.zero_grad()
        (model(input_ids=ids, use_cache=False).logits * slopes).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert all((other - gradients[0]).norm() <= 1e-6 * gradients[0].norm() for other in gradients[1:])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of transformers
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama"])
def test_experts_and_the_head_are_trained_beside_an_adapter_as_peft_loads_them(name: str, tmp_path: Path) -> None:
    experts = name != "llama"
    lora = Lora(
        rank=4,
        use_rslora=True,
        target_parameters=("experts.gate_up_proj", "experts.down_proj") * experts,
        modules_to_save=("lm_head",),
    )
    assert trained(name, lora, packing.chosen(config_of(name)).packing) < CLOSE
    model, ids = lora.prepare(model_of(name)), torch.tensor([PROMPTS[0]])
    text = "4 experts.down_proj, 4 experts.gate_up_proj, the whole lm_head" if experts else "the whole lm_head"
    assert lora.described(model).endswith(text)
    assert lora.base_names(model).keys() == dict(model_of(name).named_parameters()).keys()
    with torch.no_grad():
        for _, parameter in lora.parameters(model):
            parameter += torch.randn_like(parameter) * 0.1
        lora.save(model, SimpleNamespace(save_pretrained=lambda _: None), tmp_path)
        theirs, again = PeftModel.from_pretrained(model_of(name), tmp_path), lora.prepare(model_of(name))
        lora.load(again, tmp_path)
        logits = model(input_ids=ids).logits
        assert torch.equal(theirs(input_ids=ids).logits, logits)
        assert torch.equal(again(input_ids=ids).logits, logits)
        assert not torch.allclose(logits, model_of(name)(input_ids=ids).logits, atol=0.1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of transformers
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merged_experts_compute_and_learn_what_an_adapters_do(name: str, tmp_path: Path) -> None:
    experts = ("experts.gate_up_proj", "experts.down_proj")
    plain = Lora(rank=4, target_parameters=experts, modules_to_save=("lm_head",))
    merged = dataclasses.replace(plain, merged=True)
    assert trained(name, merged, packing.chosen(config_of(name)).packing) < CLOSE
    ids, outcomes = torch.tensor([PROMPTS[0]]), []
    for lora in (plain, merged):
        model = lora.prepare(model_of(name))
        live = lora.live_tensors(model)
        torch.manual_seed(0)
        for key in sorted(live):
            live[key].data.copy_(torch.randn_like(live[key]) * 0.1)
        lora.fold(model)
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        slopes = {parameter.data_ptr(): parameter.grad for _, parameter in lora.parameters(model)}
        outcomes.append((logits, torch.cat([slopes[live[key].data_ptr()].flatten() for key in sorted(live)])))
    (logits, slope), (folded, theirs) = outcomes
    assert (folded - logits).norm() < CLOSE * logits.norm()
    assert (theirs - slope).norm() < CLOSE * slope.norm()
    source = [key for key, _ in merged.source(model)]
    assert {*source} >= {f"model.layers.{i}.mlp.{part}" for i in range(2) for part in experts} | {"lm_head.weight"}
    assert merged.base_names(model).keys() == dict(model_of(name).named_parameters()).keys()
    merged.save(model, SimpleNamespace(save_pretrained=lambda _: None), tmp_path)
    loaded = PeftModel.from_pretrained(model_of(name), tmp_path)(input_ids=ids, use_cache=False).logits
    assert (loaded - logits).norm() < CLOSE * logits.norm()
    for key, _, module in _merged.layers(model):
        if "experts" in key:  # a rank that holds the second and third
            whole = module.weight.detach().clone()
            module.unfold()
            module.weight.data = module.weight.data[1:3]
            module.cut(slice(1, 3), slice(None))
            module.fold()
            assert torch.equal(module.weight, whole[1:3])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of transformers
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # by PEFT, which unties them
def test_a_tied_head_that_is_trained_whole_stays_tied_and_is_saved_under_both_names(tmp_path: Path) -> None:
    config = config_of("llama")
    config.tie_word_embeddings = True
    base = packing.causal_class(config).from_config(config)
    lora, ids = Lora(rank=4, merged=True, modules_to_save=("lm_head",)), torch.tensor([PROMPTS[0]])
    model = lora.prepare(copy.deepcopy(base))
    assert [key for key, _ in lora.source(model) if "_proj" not in key] == ["model.embed_tokens.weight"]
    with torch.no_grad():
        for _, parameter in lora.parameters(model):
            parameter += torch.randn_like(parameter) * 0.1
        lora.fold(model)
        lora.save(model, SimpleNamespace(save_pretrained=lambda _: None), tmp_path)
        loaded, logits = PeftModel.from_pretrained(base, tmp_path)(input_ids=ids).logits, model(input_ids=ids).logits
    assert (loaded - logits).norm() < CLOSE * logits.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_parameters": ("experts.w1",)},
            "no experts' name ends in 'experts.w1'; the model has experts.down_pr",
        ),
        ({"modules_to_save": ("head",)}, "the model has no module 'head'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_of_what_a_model_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora(**options).prepare(model_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("name", "way"), [("qwen3", "tree"), ("qwen3_next", "prefix"), ("bamba", "prefix"), ("jamba", "plain")]
)
def test_what_shares_exactly_does_and_the_rest_is_plain(name: str, way: str) -> None:
    assert packing.chosen(config_of(name)).packing == way
    assert packing.chosen(config_of(name), "plain").packing == "plain"


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "gpt_oss", "lfm2"])
def test_a_prefix_is_computed_once_and_its_layers_again_where_they_keep_nothing(name: str) -> None:
    """Three groups, two with like prompts, of which one has a turn that is not shared, and a sequence alone."""
    lengths = (20, 5, 9, 3, 4, 1, 6, 12, 18, 7, 12)
    parents = (None, 0, 0, None, 3, 3, 1, None, None, 8, 8)
    plan, computed, results = Packed(lengths=lengths, parents=parents), [], []
    tokens, positions = torch.randint(3, 90, (1, sum(lengths))), torch.as_tensor(sequential_positions(plan))[None]
    model = model_of(name)
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: computed.append(args[0].numel()))
    ways: list[tuple[layers.Checkpointing, bool]] = [("none", True), ("none", False), ("selective", False)]
    for how, at_once in [*ways, ("full", False)]:
        layers.tune(model, compile=False, checkpointing=how)
        model.zero_grad()
        computed.clear()
        hidden = packing.hidden(model, tokens, positions, plan, at_once=at_once)
        hidden.double().pow(2).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((hidden.detach(), gradient))
        # Like prompts are computed to the end of the shorter one; the longer one's end goes with each of its answers.
        # Of like rows each is as long as the longest of them, and none is of one token.
        assert computed == ([7 * 31] if at_once else [2 * 18, 4 * 13, 3, 4, 2, 12])
    for other in results[1:]:
        for values, expected in zip(other, results[0], strict=True):
            assert (values - expected).norm() <= 1e-5 * expected.norm()


def test_a_comparison_takes_one_thread_and_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, error = set(), packing.Case.error

    def noted(case: packing.Case, way: str) -> float | str:
        taken.add(torch.get_num_threads())
        return error(case, way)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def work() -> int:
        torch.set_num_threads(2)
        config, before = config_of("llama"), threads()
        config.intermediate_size += 8  # not compared before
        packing.compared(config)
        assert (taken, torch.get_num_threads()) == ({1}, 2)
        deadline = time.monotonic() + 10  # OpenMP's end a little after their owner
        while threads() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        return threads() - before

    monkeypatch.setattr(packing.Case, "error", noted)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() <= 0


def test_what_is_wrong_both_ways_is_refused_with_the_figure() -> None:
    with pytest.raises(
        ConfigError,
        match=r"glm_moe_dsa model cannot be trained: .* are off by 0\.\d",
    ):
        packing.chosen(config_of("glm_moe_dsa"))


def test_a_tree_is_not_to_be_had_where_it_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"packing: tree does not fit a qwen3_next model: .* are off by \d"):
        packing.chosen(config_of("qwen3_next"), "tree")


def test_what_is_compared_on_the_host_needs_no_kernel_of_a_gpu(tmp_path: Path) -> None:
    """With flash-linear-attention installed, transformers calls it even on a CPU."""
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (package / "__init__.py").write_text("def chunk_gated_delta_rule(*_): raise ValueError('not on a CPU')")
    code = (
        "from support.families import config_of; from tandem.model import packing; import torch\n"
        "config = config_of('qwen3_next')\n"
        "print(packing.chosen(config).packing)\n"
        "packing.causal_class(config).from_config(config).eval()(torch.zeros(1, 4, dtype=torch.int64))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert ran.stdout == "prefix\n"
    assert "ValueError: not on a CPU" in ran.stderr  # of the last line: there it is called


@pytest.mark.long
def test_the_page_of_models_says_what_they_do(request: pytest.FixtureRequest) -> None:
    """``--golden`` writes it anew."""
    rows = [_row(name) for name in FAMILIES if name not in REFUSED]
    assert len(rows) >= 60
    assert len(REFUSED) <= 3
    page = _page(rows)
    if request.config.getoption("--golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert _wordy(PAGE.read_text(encoding="utf-8")) == _wordy(page)


def _row(name: str) -> str:
    choice = packing.chosen(config_of(name))
    full = _close(name, Full(), choice.packing)
    lora = 0.0 if name in NOT_LINEAR else _close(name, Lora(rank=4), choice.packing)
    far = sampled(name)
    assert far / 100 < CLOSE, name
    experts = {key for key, p in model_of(name).named_parameters() if p.dim() == 3 and "experts" in key}
    if experts:
        lora = max(lora, _close(name, Lora(rank=4, alpha=8, target_parameters=tuple(experts)), choice.packing))
    adapted = "no linear layers" if name in NOT_LINEAR else f"{lora:.0e}{', experts too' * bool(experts)}"
    tree = choice.why.removeprefix("exact within ").rpartition("as a tree ")[2].partition("; by prefix")[0]
    return f"| `{name}` | {choice.packing} | {full:.0e} | {adapted} | {far:.0e} | {cells(_PAGE)[name]} | {tree} |"


def _close(name: str, trainable: Trainable, way: str) -> float:
    """The distance in float32. Where that is as far as its own rounding, float64 tells whether it is close."""
    distance = trained(name, trainable, way)
    assert distance < CLOSE or trained(name, trainable, way, torch.float64) < CLOSE, name
    return distance


def _page(rows: Sequence[str]) -> str:
    refused = []
    for name in sorted(REFUSED):
        with pytest.raises(ConfigError) as raised:
            packing.chosen(config_of(name))
        refused.append(f"- `{name}`: {raised.value}")
    return (
        _HEAD.format(count=len(rows))
        + "\n".join(rows)
        + "\n\n## Refused\n\n"
        + "\n".join(refused)
        + "\n\n"
        + "".join(_PAGE.partition("## vLLM\n")[1:])
    )


def _wordy(page: str) -> str:
    """Without the figures that another processor rounds otherwise."""
    return re.sub(r"\d(\.\d+)?(e-\d+)?(?=[ ,;])", "#", page)


_PAGE = PAGE.read_text(encoding="utf-8")
_HEAD = """# Models

What a tiny random model of each family does, in float32, beside transformers' own forward of one sequence at a time.
`tests/unit/test_families.py` measures this page. A family that is not here is not refused: when a model is first met,
a small random copy of it is computed as a tree, then by *prefix* where that is wrong, then *plain*; `tandem check`
says which ([performance](../design/performance.md)).

{count} families are trained and sampled. *Full*, *LoRA* and *As a tree*: relative distance of logits and gradient.
*Embedded*: largest distance of a sampled token's logprob. LoRA adapts experts by `trainable.target_parameters` alone.
*[vLLM](#vllm)*: how it is published to on a CPU.

| Model type | Packing | Full | LoRA | Embedded | vLLM | As a tree |
| --- | --- | --- | --- | --- | --- | --- |
"""
