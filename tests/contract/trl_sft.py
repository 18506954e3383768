"""TRL's supervised trainer on a tiny model: token ids, what is trained of them, the loss and its gradient, in float64.

    bash benchmarks/peers/setup
    .venv-peers/bin/python tests/contract/trl_sft.py tests/contract/trl_sft.json

The suite compares Tandem with the file that this wrote; TRL is not needed there.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEMPLATE = (
    "{% for message in messages %}{{ ('' if loop.first else '\n') + '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML that says what the assistant's words are, and ends with the last message's end."""


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


SETS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": messages("2 + 3?", "5.")},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *messages("Name two.", "Ä and ö.", "More?", "No more"),
            ]
        },
        {"messages": messages("Why?", "Because it is so, and was so, and will be so for as long as anyone asks.")},
    ],
    "prompt and completion": [
        {"prompt": messages("4 + 4?"), "completion": [{"role": "assistant", "content": "It is 8."}]},
        {"prompt": messages("a", "b", "c"), "completion": [{"role": "assistant", "content": "d, as you know"}]},
    ],
}
"""Rows, by their kind."""


def tokenizer() -> Any:
    """Bytes, and the three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )


def model() -> Any:
    """A Llama whose weights are a formula, so that no library's random numbers matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for place, (_, parameter) in enumerate(sorted(made.named_parameters())):
            waves = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (1.7 + place) + place)
            parameter.copy_((waves * 0.3 + (parameter.dim() == 1)).view_as(parameter))
    return made


def sketch(grad: Tensor) -> list[float]:
    """A few numbers that no other gradient has: its norm, and its parts along three waves."""
    flat = grad.detach().double().flatten()
    places = torch.arange(flat.numel(), dtype=torch.float64)
    return [float(flat.norm()), *(float(flat @ torch.cos(places * (0.3 + wave))) for wave in range(3))]


def main(path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    out: dict[str, Any] = {}
    for name, rows in SETS.items():
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to=[], assistant_only_loss=name == "messages",
                per_device_train_batch_size=len(rows), gradient_checkpointing=False, max_length=None,
            )  # fmt: skip
            live = model().double()
            trainer = SFTTrainer(
                model=live, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
            )
            batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
            count = (batch["labels"][:, 1:] != -100).sum()
            loss = trainer.compute_loss(live, dict(batch), num_items_in_batch=count)
            loss.backward()
        sequences = [
            {"tokens": ids[kept].tolist(), "trained": (labels[kept] != -100).int().tolist()}
            for ids, labels, kept in zip(
                batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
            )
        ]
        assert math.isfinite(loss.item())
        gradients = {key: sketch(p.grad) for key, p in live.named_parameters()}
        out[name] = {"sequences": sequences, "loss": loss.item(), "gradients": gradients}
    path.write_text(json.dumps(out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
