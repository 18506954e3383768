"""Random models of well-known shapes with a byte-level tokenizer, made on the spot: speed does not depend on values."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 4000,  # not a multiple of 64: vLLM pads it
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "small": {  # sampling and training take some seconds each on one core
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "vocab_size": 8000,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-14b": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13824,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {  # 6 of 48 layers
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {  # 6 of 24 layers
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "vocab_size": 201088,
        "max_position_embeddings": 131072,  # the factor times the original ones
        "tie_word_embeddings": False,
    },
    "qwen3.5-2b": {  # in qwen3_next's words, whose text model vLLM has by itself if a layer is of experts
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 6144,
        "linear_num_key_heads": 8,  # half of the values': of as many, vLLM 0.26 starts no qwen3_next
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mlp_only_layers": list(range(23)),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248320,
        "tie_word_embeddings": False,  # Qwen3.5's are, but vLLM 0.26 leaves the head of a qwen3_next zero then
    },
}
"""From the published configurations; without a model type Qwen2's, or Qwen3's where heads have a size of their own."""
_SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 8000}
SHAPES["hybrid-small"] = {**SHAPES["qwen3.5-2b"], **_SMALL, "linear_key_head_dim": 64, "mlp_only_layers": [0, 1, 2]}

CONTEXT = 16384
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADROOM = 4 << 30


def scratch(needed: int) -> Path:
    """A folder in memory if that has room for so many bytes, else on disk."""
    for folder in (Path("/dev/shm"), Path("/tmp"), Path.cwd()):
        if folder.is_dir() and shutil.disk_usage(folder).free > needed + HEADROOM:
            return folder
    raise SystemExit(f"no folder has room for {needed / 1e9:.0f} GB; free some, or give --folder")


def size(shape: str, dtype: torch.dtype) -> int:
    """Bytes of the weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape))
    num: int = sum(p.numel() for p in model.parameters())
    return num * dtype.itemsize


def build(shape: str, dtype: torch.dtype, folder: Path) -> Path:
    """Write the model as a Hugging Face folder, unless it is there."""
    from transformers import AutoModelForCausalLM

    target = folder / f"{shape}-{str(dtype).removeprefix('torch.')}"
    if (target / "done").exists():
        return target
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # made as zeros, which would hide a bias that did not travel
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(target)
    tokenizer().save_pretrained(target)
    (target / "done").touch()
    print(f"made {target} in {time.monotonic() - begin:.0f} s", flush=True)
    return target


def fields_of(shape: str) -> dict[str, Any]:
    """A shape's configuration, with what follows its name in place of its own: ``qwen3-4b,num_hidden_layers=8``."""
    name, *others = shape.split(",")
    return {**SHAPES[name], **{key: int(value) for key, value in (other.split("=") for other in others)}}


def model_config(shape: str) -> Any:
    """Transformers' configuration of it."""
    from transformers import AutoConfig

    special, fields = tokenizer(), fields_of(shape)
    kind = "qwen3" if "head_dim" in fields else "qwen2"
    return AutoConfig.for_model(
        **{
            "model_type": kind,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.02,
            **fields,
        },
        bos_token_id=special.bos_token_id,
        eos_token_id=special.eos_token_id,
        pad_token_id=special.pad_token_id,
    )


def tokenizer(vocabulary: int = 0) -> Any:
    """Bytes, three special tokens, and pairs or triples of letters up to a size, so that decoding costs what it does.

    Nothing is merged: a prompt has as many tokens as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    words = ("".join(word) for length in (2, 3) for word in itertools.product(letters, repeat=length))
    few = max(0, vocabulary - len(alphabet) - len(special))
    vocab = {entry: i for i, entry in enumerate([*alphabet, *special, *itertools.islice(words, few)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def made_apart(shape: str, folder: Path | None) -> Path:
    """The random model of a shape, made by a process of its own, so that the card's memory is given back."""
    command = [sys.executable, __file__, shape, *([str(folder)] if folder else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def main() -> None:
    """``_models.py SHAPE [FOLDER]``: a model whose tokenizer has text for every token."""
    shape, *folder = sys.argv[1:]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    where = Path(folder[0]) if folder else scratch(size(shape, dtype)) / "tandem-versus"
    model = build(shape, dtype, where.absolute())
    if not (model / "whole-vocabulary").exists():
        tokenizer(fields_of(shape)["vocab_size"]).save_pretrained(model)
        (model / "whole-vocabulary").touch()
    print(model)


if __name__ == "__main__":
    main()
