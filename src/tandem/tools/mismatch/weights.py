"""Logprobs of recorded tokens once more, by any weights that are on disk and under any supposition of how."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.config.loading import RunConfig
from tandem.errors import TandemError
from tandem.model import penalties
from tandem.model.attention import KVCache, Packed, decode_plan, sequential_positions
from tandem.model.logprobs import token_logprobs
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.tools.mismatch.recorded import RecordedTurn
from tandem.trainer.checkpoint import saved_steps

Prompts = Sequence[tuple[int, ...]]
"""Ids before each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which types a logprob is computed."""

    name: str
    """What a person calls it."""
    body: torch.dtype
    """Of the layers."""
    head: torch.dtype
    """Of the product with the output embedding, whose result is rounded to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Transform of logits before the softmax."""

    name: str
    """What a person calls it."""
    temperature: bool = True
    """They are divided by the temperature."""
    support: bool = True
    """Those outside top_p, top_k and min_p are left out and the rest renormalised."""
    penalties: bool = True
    """Those of tokens before are lowered by the penalties."""


DECLARED = Transform(name="as sampled")


class _Head:
    """The output embedding in some type; the policy's own storage where that is its type."""

    def __init__(self, policy: Policy, dtype: torch.dtype):
        bias: Tensor | None = getattr(policy.head, "bias", None)
        self.weight_VH = policy.head.weight.to(dtype)
        self.bias_V = None if bias is None else bias.to(dtype)


class Lab:
    """One model in memory, into which any version's weights are brought."""

    def __init__(self, config: RunConfig, folder: Path):
        """Raises ConfigError if the model cannot be read."""
        self._config = config
        self._checkpoints = folder / "checkpoints"
        self.saved = tuple(saved_steps(self._checkpoints))
        self.versions = (0, *(step for step in self.saved if step > 0))
        self.tokenizer: Any = load_tokenizer(config.model, chat_template=config.chat_template)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.own = Precision(name="as trained", body=self.dtype, head=self.dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._compute = Compute(1)  # a policy has one; nothing here runs on it
        self._held: tuple[int, Policy] | None = None
        self._ends: Sequence[int] = ()  # token ids that end an answer, once a model was read

    def close(self) -> None:
        """End its thread."""
        self._compute.close()

    @property
    def device(self) -> str:
        """Where it computes."""
        return self._device.type

    @property
    def wider(self) -> Precision:
        """A type in which the run's own rounding does not happen."""
        wide = torch.float32 if self.dtype.itemsize == 2 else torch.float64
        return Precision(name=str(wide).removeprefix("torch."), body=wide, head=wide)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Other ways an engine may have computed."""
        narrow, wide = torch.bfloat16, torch.float32
        if self.dtype == wide:
            return (
                Precision(name="the head in bfloat16", body=wide, head=narrow),
                Precision(name="everything in bfloat16", body=narrow, head=narrow),
            )
        return (
            Precision(name="the head in float32", body=self.dtype, head=wide),
            Precision(name="everything in float32", body=wide, head=wide),
        )

    @torch.no_grad()
    def logprobs(
        self,
        turns: Sequence[RecordedTurn],
        prompts: Prompts,
        version: int,
        body: torch.dtype,
        ways: Sequence[tuple[torch.dtype, Transform]],
    ) -> dict[tuple[torch.dtype, Transform], Tensor]:
        """Logprob of every sampled token of all turns, float64 on the host, for each way to compute the head.

        Args:
            turns: what was sampled.
            prompts: after what.
            version: whose weights; one of ``versions``.
            body: type of the layers.
            ways: type of the head's product, and what is done to its logits.

        Raises:
            TandemError: a token is none of the model's.
            CheckpointError: the weights cannot be read.
        """
        policy = self._policy(version)
        if body != self.dtype:
            model = copy.deepcopy(policy.model).to(body)
            policy = Policy(model, policy.tokenizer, name=policy.name, compute=self._compute)
        by_way: dict[tuple[torch.dtype, Transform], list[Tensor]] = {way: [] for way in ways}
        heads = {head: _Head(policy, head) for head, _ in ways}
        for some, before in _batches(turns, prompts, self._config.micro_batch_tokens):
            hidden_NH = _hidden(policy, some, before)
            for (head, transform), parts in by_way.items():
                parts.append(self._ended(heads[head], hidden_NH, some, before, transform))
        return {way: torch.cat(parts) for way, parts in by_way.items()}

    @torch.no_grad()
    def carried(self, turns: Sequence[RecordedTurn]) -> Tensor:
        """Logprob of every sampled token, each by its own version's weights on the keys and values of those before it.

        So samples an engine that goes on with an answer when new weights come: what is cached stays as it is. All
        versions must be on disk, and none may be older than the one before it.
        """
        out: list[list[Tensor]] = [[] for _ in turns]
        cache: KVCache | None = None
        for version in sorted({version for turn in turns for version in turn.versions}):
            policy = self._policy(version)
            if cache is None:
                cache = _cache(policy, len(turns))
                cache.reserve(max(len(turn.prompt) + len(turn.tokens) for turn in turns))
            for row, turn in enumerate(turns):
                if turn.versions[0] == version:
                    begun = _cut(turn, turn.versions.count(version))
                    hidden_NH = _prefilled(policy, begun, cache, row)
                    head = _Head(policy, self.dtype)
                    out[row].append(self._ended(head, hidden_NH, [begun], [begun.prompt], DECLARED))
            for row, logprob in self._decoded(policy, turns, version, cache):
                out[row].append(logprob)
        return torch.cat([part for parts in out for part in parts])

    def _decoded(
        self, policy: Policy, turns: Sequence[RecordedTurn], version: int, cache: KVCache
    ) -> Iterator[tuple[int, Tensor]]:
        """Row and logprob of each token that a version sampled of an answer begun by another, one step at a time."""
        due = {
            row: [i for i, v in enumerate(turn.versions) if v == version]
            for row, turn in enumerate(turns)
            if turn.versions[0] < version
        }
        # Of an answer that this version began, all that it sampled is in the cache already.
        at = [
            len(turn.prompt) + sum(v < version or v == version == turn.versions[0] for v in turn.versions) - 1
            for turn in turns
        ]
        for step in range(max(map(len, due.values()), default=0)):
            now = {row: places[step] for row, places in due.items() if step < len(places)}
            # Rows without a token now get one that the next real one overwrites.
            fed = [turns[row].tokens[now[row] - 1] if row in now else 0 for row in range(len(turns))]
            plan = decode_plan(cache, at, policy.device, policy.dtype)
            ids_R1 = torch.tensor(fed, device=policy.device)[:, None]
            hidden_RH = policy.hidden(ids_R1, plan.positions_R[:, None], plan)[:, 0]
            for row, place in now.items():
                one, head = _cut(turns[row], place + 1), _Head(policy, self.dtype)
                yield row, self._ended(head, hidden_RH[row : row + 1], [one], [one.prompt], DECLARED, skip=place)
                at[row] += 1

    def _ended(
        self,
        head: _Head,
        hidden_NH: Tensor,
        turns: Sequence[RecordedTurn],
        prompts: Prompts,
        transform: Transform,
        *,
        skip: int = 0,
    ) -> Tensor:
        """From hidden states to logprobs of the turns' tokens but the first ``skip`` of each, float64 on the host."""
        sampling, device = self._config.sampling, hidden_NH.device
        temperatures = [
            turn.temperature if transform.temperature else 1.0 for turn in turns for _ in turn.tokens[skip:]
        ]
        targets = [token for turn in turns for token in turn.tokens[skip:]]
        logprobs_N, _ = token_logprobs(
            hidden_NH.to(head.weight_VH.dtype),
            head.weight_VH,
            torch.tensor(targets, device=device),
            torch.tensor(temperatures, device=device),
            bias=head.bias_V,
            top_p=sampling.top_p if transform.support else 1.0,
            top_k=sampling.top_k if transform.support else 0,
            min_p=sampling.min_p if transform.support else 0.0,
            history=self._history(turns, prompts, skip, device) if transform.penalties else None,
        )
        return logprobs_N.double().cpu()

    def _history(
        self, turns: Sequence[RecordedTurn], prompts: Prompts, skip: int, device: torch.device
    ) -> penalties.TokenHistory | None:
        """What was before each token, where the recipe penalises it."""
        options = penalties.Penalties.of(self._config.sampling, self._ends)
        if options is None:
            return None
        pasts = []
        for turn, prompt in zip(turns, prompts, strict=True):
            whole = np.array([*prompt, *turn.tokens], dtype=np.int64)
            at = np.arange(len(prompt) + skip, len(whole))
            pasts.append(penalties.Past.of(whole, at, [(len(prompt), len(whole))]))
        return penalties.TokenHistory.of(options, [torch.from_numpy(a).to(device) for a in penalties.joined(pasts)])

    def _policy(self, version: int) -> Policy:
        if self._held is not None and self._held[0] == version:
            return self._held[1]
        if self._held is None or version == 0:
            self._held = None  # before the next is read: only one model is in memory
            torch.manual_seed(self._config.seed)
            model = load_model(self._config.model, dtype=self.dtype, device=self._device)
            prepared = self._config.trainable.prepare(model).eval()
            policy = Policy(prepared, self.tokenizer, name=self._config.model, compute=self._compute)
            self._ends = sorted(policy.end_tokens)
        else:
            policy = self._held[1]
        if version:
            trainable = self._config.trainable
            trainable.load(policy.model, self._checkpoints / f"{version:06d}" / trainable.folder_name)
        self._held = (version, policy)
        return policy


def _batches(
    turns: Sequence[RecordedTurn], prompts: Prompts, budget: int
) -> Iterator[tuple[list[RecordedTurn], list[tuple[int, ...]]]]:
    """Turns that are computed together, in order: at most ``budget`` tokens, or one turn that is longer."""
    some: list[RecordedTurn] = []
    before: list[tuple[int, ...]] = []
    used = 0
    for turn, prompt in zip(turns, prompts, strict=True):
        cost = len(turn.tokens) - 1 + (0 if prompt in before else len(prompt))
        if some and used + cost > budget:
            yield some, before
            some, before, used = [], [], 0
            cost = len(turn.tokens) - 1 + len(prompt)
        some.append(turn)
        before.append(prompt)
        used += cost
    if some:
        yield some, before


def _cut(turn: RecordedTurn, count: int) -> RecordedTurn:
    """The turn as it was after its first tokens."""
    return replace(turn, tokens=turn.tokens[:count], versions=turn.versions[:count])


def _cache(policy: Policy, rows: int) -> KVCache:
    heads = policy.config.num_attention_heads
    return KVCache(
        layers=policy.config.num_hidden_layers,
        rows=rows,
        heads=getattr(policy.config, "num_key_value_heads", None) or heads,
        head_dim=getattr(policy.config, "head_dim", None) or policy.config.hidden_size // heads,
        dtype=policy.dtype,
        device=policy.device,
    )


def _prefilled(policy: Policy, turn: RecordedTurn, cache: KVCache, row: int) -> Tensor:
    """The hidden state that predicts each token of a turn; keys and values go to a row of the cache."""
    ids = torch.tensor([*turn.prompt, *turn.tokens[:-1]], device=policy.device)
    plan = Packed(lengths=(len(ids),), parents=(None,), store=(cache, ((row,),)))
    positions_T = torch.arange(len(ids), device=policy.device)
    return policy.hidden(ids[None], positions_T[None], plan)[0, len(turn.prompt) - 1 :]


def _hidden(policy: Policy, turns: Sequence[RecordedTurn], prompts: Prompts) -> Tensor:
    """The hidden state that predicts each sampled token, (N, H). Turns after the same ids share them."""
    ids: list[int] = []
    lengths: list[int] = []
    parents: list[int | None] = []
    predict: list[int] = []
    roots: dict[tuple[int, ...], tuple[int, int]] = {}
    for turn, prompt in zip(turns, prompts, strict=True):
        if prompt not in roots:
            ids += prompt
            roots[prompt] = (len(lengths), len(ids) - 1)
            lengths.append(len(prompt))
            parents.append(None)
        parent, last = roots[prompt]
        start = len(ids)
        if rest := turn.tokens[:-1]:
            ids += rest
            lengths.append(len(rest))
            parents.append(parent)
        predict += [last, *range(start, start + len(rest))]
    most = policy.head.weight.shape[0]
    wrong = next((i for i in (*ids, *(turn.tokens[-1] for turn in turns)) if not 0 <= i < most), None)
    if wrong is not None:
        raise TandemError(
            f"the record has token {wrong} and the model {policy.name} only {most}: it is not the model of this run"
        )
    plan = Packed(lengths=tuple(lengths), parents=tuple(parents))
    device = policy.device
    positions_T = torch.tensor(sequential_positions(plan), device=device)
    hidden_TH = policy.hidden(torch.tensor(ids, device=device)[None], positions_T[None], plan)[0]
    return hidden_TH.index_select(0, torch.tensor(predict, device=device))
