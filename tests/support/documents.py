"""What the documents' examples are trained with: a tiny model that answers shortly, rows, and the embedded engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import torch
from conftest import build_tiny_model
from support.brokers import served
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertTokenizerFast,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
)

from tandem_broker.client import Connection, EnvClient
from tandem_broker.protocol.messages import EnvRegistration, ScoredGroup

STAND_IN = ("engine=embedded", "sync=shared")
"""Overrides where an example has vLLM beside or within the trainer: the trainer's own model samples instead."""
SHORT_RUN = ("steps=2", "name=run", "threads=1")
"""Overrides of every example."""


def build_brief_model(folder: Path, head_dim: int = 16) -> Path:
    """Write a tiny model whose answers are a few characters long, often just ``3``, whatever the limit of tokens is.

    So an example keeps its lengths. The first number of every hidden state is large and the same, and the head turns it
    into a preference for some tokens.
    """
    build_tiny_model(folder, tie=False, context=65536, head_dim=head_dim)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config.num_hidden_layers = 4  # some examples train the first four
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float()
        model.get_input_embeddings().weight[:, 0] = 4.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[tokenizer.convert_tokens_to_ids("3"), 0] = 1.05
        head[tokenizer.eos_token_id, 0] = 1.05
    model.save_pretrained(folder)
    return folder


def build_reward_model(folder: Path) -> Path:
    """Like OpenAssistant's: DeBERTa, without a chat template."""
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789+=?"]
    (folder / "vocab.txt").write_text("\n".join([*words, *(f"##{word}" for word in words[5:])]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = DebertaV2Config(vocab_size=90, num_labels=1, initializer_range=0.5, **sizes)
    DebertaV2ForSequenceClassification(config).float().save_pretrained(folder)
    return folder


GROUP = 4
"""Answers of each group that ``environment_elsewhere`` hands in."""


def _group(n: int, env_id: int) -> ScoredGroup:
    """Four answers to one prompt, by somebody who knows tokens and scores and nothing else."""
    tokens = [[*b"say it:", *f"{n % 90 + 10}{answer}".encode()] for answer in range(GROUP)]
    return ScoredGroup(
        tokens=tokens,
        masks=[[*[-100] * 7, *row[7:]] for row in tokens],
        scores=[1.0, 0.5, 0.0, 0.0],
        inference_logprobs=[[*[1.0] * 7, *[-5.5] * (len(row) - 7)] for row in tokens],
        env_id=env_id,
    )


async def _hand_in(url: str, groups: int) -> None:
    spec = EnvRegistration(max_token_length=64, desired_name="elsewhere", weight=1.0, group_size=GROUP)
    async with EnvClient(Connection(url), spec, key="elsewhere", poll=0.05) as client:
        ticket = await client.register()
        for n in range(groups):
            headers = {"Idempotency-Key": f"elsewhere-{n}"}
            group = _group(n, ticket.env_id)
            answer = await client.connection.ask("POST", "/scored_data", group, headers=headers)
            assert json.loads(answer.body)["status"] == "received"


@contextmanager
def environment_elsewhere(groups: int) -> Iterator[str]:
    """The address of a broker in a thread of this process, which is handed groups as soon as a trainer has started."""
    address: Future[str] = Future()
    loop = asyncio.new_event_loop()

    async def scene() -> None:
        async with served() as client:
            address.set_result(client.url)
            await _hand_in(client.url, groups)
            await asyncio.Event().wait()  # until it is cancelled: the trainer takes them one step after the other

    thread = Thread(target=loop.run_forever)
    thread.start()
    playing = asyncio.run_coroutine_threadsafe(scene(), loop)
    try:
        yield address.result(30)
        if playing.done():
            playing.result()  # its error
    finally:
        playing.cancel()
        loop.call_soon_threadsafe(lambda: loop.call_later(0.2, loop.stop))
        thread.join()
        loop.close()
