"""What is trained, what travels, and that a saved folder loads in Hugging Face's libraries and back, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tandem.errors import CheckpointError, ConfigError
from tandem.trainable import _adapted
from tandem.trainable.base import Trainable, layer_of
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.transport.adapters import write_adapter

TOKENS = torch.arange(12).reshape(2, 6)


def model(seed: int = 0, *, tie: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    made = LlamaForCausalLM(config).eval()
    for parameter in made.parameters():  # not .to(dtype): the rotary frequencies stay float32, as from_pretrained's
        parameter.data = parameter.data.to(dtype)
    return made


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def stir(trainable: Trainable, module: nn.Module, seed: int) -> None:
    """What training does, as far as anyone here can tell."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable.parameters(module):
            parameter.add_(torch.randn_like(parameter) * 0.1)


@torch.no_grad()
def logits(module: nn.Module) -> Tensor:
    return module(input_ids=TOKENS).logits  # type: ignore[no-any-return]


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_round_trip(tmp_path: Path, tokenizer: Any, tie: bool, dtype: torch.dtype) -> None:
    trainable = Full()
    live = trainable.prepare(model(tie=tie, dtype=dtype))
    stir(trainable, live, 1)
    trainable.save(live, tokenizer, tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert loaded.dtype == dtype
    assert same(bits(loaded), bits(live))
    assert torch.equal(logits(loaded), logits(live))
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.encode("two words") == tokenizer.encode("two words")
    assert again.chat_template == tokenizer.chat_template

    other = trainable.prepare(model(seed=5, tie=tie, dtype=dtype))
    addresses = {name: p.data_ptr() for name, p in other.named_parameters()}
    trainable.load(other, tmp_path / "model")
    assert same(bits(other), bits(live))
    assert addresses == {name: p.data_ptr() for name, p in other.named_parameters()}, "in place"
    assert all(p.requires_grad for p in other.parameters())


def test_saved_model_does_not_ask_for_our_attention(tmp_path: Path, tokenizer: Any) -> None:
    AttentionInterface.register("only_in_this_process", lambda *_: None)
    live = model()
    live.config._attn_implementation = "only_in_this_process"
    Full().save(live, tokenizer, tmp_path)
    assert "only_in_this_process" not in (tmp_path / "config.json").read_text()
    assert live.config._attn_implementation == "only_in_this_process"
    assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(tmp_path))).all()


def test_full_loads_a_model_that_is_stored_under_other_names(tmp_path: Path, tokenizer: Any) -> None:
    """transformers runs a mixture of experts fused and stores it expert by expert."""
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        max_position_embeddings=64,
    )
    live, other = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    assert not same(bits(live), bits(other))
    Full().save(live, tokenizer, tmp_path)
    Full().load(other, tmp_path)
    assert same(bits(live), bits(other))


# PEFT asks transformers for a property by a name that transformers has since deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_round_trip(tmp_path: Path, tokenizer: Any, dtype: torch.dtype) -> None:
    from peft import PeftModel

    trainable = Lora(rank=4, alpha=8)
    live = trainable.prepare(model(dtype=dtype)).eval()
    assert torch.equal(logits(live), logits(model(dtype=dtype))), "a fresh adapter changes nothing"
    stir(trainable, live, 1)
    assert not torch.equal(logits(live), logits(model(dtype=dtype)))
    trainable.save(live, tokenizer, tmp_path / "adapter")

    loaded = PeftModel.from_pretrained(model(dtype=dtype), tmp_path / "adapter", autocast_adapter_dtype=False).eval()
    assert torch.equal(logits(_adapted.adapt(loaded)), logits(live))
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").eos_token == tokenizer.eos_token

    torch.manual_seed(9)
    other = trainable.prepare(model(dtype=dtype)).eval()
    addresses = {name: p.data_ptr() for name, p in other.named_parameters()}
    trainable.load(other, tmp_path / "adapter")
    assert same(bits(other), bits(live))
    assert addresses == {name: p.data_ptr() for name, p in other.named_parameters()}, "in place"


def test_lora_trains_the_adapter_alone_in_the_type_of_the_base() -> None:
    live = Lora(rank=4).prepare(model(dtype=torch.bfloat16))
    trained = Lora().parameters(live)
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name and p.dtype == torch.bfloat16 for name, p in trained)
    assert not any(p.requires_grad for name, p in live.named_parameters() if "lora_" not in name)
    assert {p.shape[0] for name, p in trained if "lora_A" in name} == {4}


def test_lora_learns_and_leaves_the_base_alone() -> None:
    trainable = Lora(rank=4)
    live = trainable.prepare(model())
    before = bits(live)
    live(input_ids=TOKENS).logits.square().sum().backward()
    with torch.no_grad():
        for _, parameter in trainable.parameters(live):
            assert parameter.grad is not None
            parameter.sub_(parameter.grad * 0.1)
    changed = {name for name, tensor in live.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_B" in name}, "A has no gradient while B is zero"


@pytest.mark.parametrize(
    ("trainable", "trained"),
    [
        (Full(layers=(1,)), 9),
        (Full(layers=(0, 1)), 18),
        (Full(), 20),
        (Lora(layers=(1,)), 14),
        (Lora(layers=(0,), target_modules=("q_proj", "down_proj")), 4),
        (Lora(target_modules=("q_proj",)), 4),
        (Lora(layers=(0,), target_modules=("q_proj", "down_proj"), merged=True), 4),
        (Lora(target_modules=("self_attn.q_proj", "layers.1.mlp.down_proj")), 6),
        (Lora(target_modules=r"model\.layers\.1\..*\.[qv]_proj"), 4),
        (Lora(layers=(1,), target_modules=r".*\.[qv]_proj", merged=True), 4),
    ],
)
def test_which_parameters_train(trainable: Trainable, trained: int) -> None:
    live = trainable.prepare(model())
    names = [name for name, _ in trainable.parameters(live)]
    assert len(names) == trained
    assert trainable.layers is None or {layer_of(name) for name in names} == set(trainable.layers)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("targets", [("self_attn.q_proj",), r".*\.1\..*\.[qv]_proj"])
def test_a_written_adapter_adapts_what_was_trained(
    tmp_path: Path, targets: tuple[str, ...] | str, merged: bool
) -> None:
    trainable = Lora(rank=2, target_modules=targets, merged=merged)
    live = trainable.prepare(model())
    write_adapter(tmp_path, tensors := trainable.live_tensors(live), trainable.adapter_config(live))
    loaded = PeftModel.from_pretrained(model(), tmp_path)
    assert get_peft_model_state_dict(loaded, save_embedding_layers=False).keys() == tensors.keys()


def test_modules_that_match_nothing_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no linear layer's whole name matches 'q_proj'; it has .*q_proj"):
        Lora(target_modules="q_proj").prepare(model())
    with pytest.raises(ValueError, match="no regular expression"):
        Lora(target_modules="(q")


@pytest.mark.parametrize("trainable", [Full(), Full(layers=(0,)), Lora(rank=2)])
@pytest.mark.parametrize("tie", [True, False])
def test_source_is_live_and_repeats(trainable: Trainable, tie: bool) -> None:
    live = trainable.prepare(model(tie=tie, dtype=torch.bfloat16))
    source = trainable.source(live)
    owners = dict(live.named_parameters())
    assert [name for name, _ in source] == [name for name, _ in trainable.parameters(live)]
    for name, tensor in source:
        assert tensor.data_ptr() == owners[name].data_ptr()
    storages = [tensor.data_ptr() for _, tensor in source]
    assert len(set(storages)) == len(storages), "tied weights travel once"
    stir(trainable, live, 3)
    assert all(torch.equal(tensor, owners[name]) for name, tensor in source)


@pytest.mark.parametrize("trainable", [Full(), Lora(rank=2)])
def test_source_follows_storage_that_is_moved(trainable: Trainable) -> None:
    live = trainable.prepare(model())
    source = trainable.source(live)
    for parameter in live.parameters():
        parameter.data = parameter.detach().clone()
    owners = dict(live.named_parameters())
    assert all(tensor.data_ptr() == owners[name].data_ptr() for name, tensor in source)


@pytest.mark.parametrize(
    "trainable", [Full(), Full(layers=(0,)), Lora(), Lora(layers=(1,), target_modules=("q_proj",)), Lora(merged=True)]
)
@pytest.mark.parametrize("tie", [True, False])
def test_base_names_are_those_of_the_causal_model(trainable: Trainable, tie: bool) -> None:
    plain = dict(model(tie=tie).named_parameters())
    live = trainable.prepare(model(tie=tie))
    names = trainable.base_names(live)
    assert list(names) == list(plain), "Hugging Face's names in Hugging Face's order, tied ones once"
    assert all(torch.equal(parameter, plain[name]) for name, parameter in names.items())
    own = {id(parameter) for parameter in live.parameters()}
    assert all(id(parameter) in own for parameter in names.values()), "the live parameters, not copies"


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (Full(layers=(2,)), "no layer 2; the model has layers 0 to 1"),
        (Lora(layers=(7,)), "no layer 7"),
        (Lora(target_modules=("q_proj", "qproj")), "no linear layer 'qproj'; it has down_proj, .*q_proj"),
        (Lora(target_modules=("lm_head",)), "no linear layer 'lm_head'"),
    ],
)
def test_options_that_do_not_fit_the_model(trainable: Trainable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainable.prepare(model())


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (Full, {"layers": ()}, "layers"),
        (Full, {"layers": (-1,)}, "layers"),
        (Lora, {"rank": 0}, "rank"),
        (Lora, {"alpha": 0}, "alpha"),
        (Lora, {"target_modules": ()}, "target_modules"),
    ],
)
def test_options_that_make_no_sense(kind: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


@pytest.mark.parametrize("trainable", [Full(), Lora(rank=2)])
def test_damaged_folders_are_refused(tmp_path: Path, tokenizer: Any, trainable: Trainable) -> None:
    live = trainable.prepare(model())
    whole = tmp_path / "whole"
    trainable.save(live, tokenizer, whole)
    file = next(whole.glob("*.safetensors"))

    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / file.name).write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainable.load(live, cut)

    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        trainable.load(live, empty)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    wide, narrow = Lora(rank=4), Lora(rank=2)
    wide.save(wide.prepare(model()), tokenizer, tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"lora_A.*\(4, \d+\).*\(2, \d+\)"):
        narrow.load(narrow.prepare(model()), tmp_path / "wide")

    part = Lora(rank=4, target_modules=("q_proj",))
    part.save(part.prepare(model()), tokenizer, tmp_path / "part")
    with pytest.raises(CheckpointError, match="lacks 24 of 28 adapter tensors"):
        wide.load(wide.prepare(model()), tmp_path / "part")

    Full().save(model(), tokenizer, tmp_path / "float32")
    with pytest.raises(CheckpointError, match=r"torch\.float32.*torch\.bfloat16"):
        Full().load(model(dtype=torch.bfloat16), tmp_path / "float32")


def test_adapter_config_names_what_vllm_reads(tmp_path: Path, tokenizer: Any) -> None:
    trainable = Lora(rank=4, alpha=8, layers=(1,), target_modules=("q_proj", "v_proj"))
    trainable.save(trainable.prepare(model()), tokenizer, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, ["q_proj", "v_proj"])
    assert config["layers_to_transform"] == [1]
    assert config["peft_type"] == "LORA"


@pytest.mark.slow
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"layers": (1,)}, {"target_modules": ("v_proj", "q_proj")}, {"rank": 3, "alpha": 5}]
)
def test_adapter_config_in_memory_is_the_one_on_disk(
    tmp_path: Path, tokenizer: Any, merged: bool, options: dict[str, Any]
) -> None:
    trainable = Lora(merged=merged, **options)
    live = trainable.prepare(model())
    mine = trainable.adapter_config(live)
    assert (mine["r"], mine["lora_alpha"]) == (trainable.rank, trainable.alpha)
    assert isinstance(mine["target_modules"], list)
    plain = Lora(**options)
    plain.save(plain.prepare(model()), tokenizer, tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    stored["target_modules"].sort()  # PEFT writes a set
    assert json.loads(json.dumps(mine)) == stored
