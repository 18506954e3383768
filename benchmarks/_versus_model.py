"""A random model of a known shape whose tokenizer has text for every token: what both halves read."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from _models import CHAT_TEMPLATE, CONTEXT, SHAPES, build, scratch, size


def made(shape: str, folder: Path | None) -> Path:
    """Its folder; made unless it is there."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    where = (folder or scratch(size(shape, dtype)) / "tandem-versus").absolute()
    where.mkdir(parents=True, exist_ok=True)
    model = build(shape, dtype, where)
    if not (model / "whole-vocabulary").exists():
        tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(model)
        (model / "whole-vocabulary").touch()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model


def tokenizer(vocabulary: int) -> Any:
    """Bytes, three special tokens, and pairs or triples of letters, so that decoding costs what it does for a real one.

    Nothing is merged: a prompt has as many tokens as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    words = ("".join(word) for length in (2, 3) for word in itertools.product(letters, repeat=length))
    entries = [*alphabet, *special, *itertools.islice(words, vocabulary - len(alphabet) - len(special))]
    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def main() -> None:
    """``_versus_model.py SHAPE [FOLDER]``, in a process of its own so that the card's memory is given back with it."""
    shape, *folder = sys.argv[1:]
    print(made(shape, Path(folder[0]) if folder else None))


if __name__ == "__main__":
    main()
