"""On-policy distillation: its gradient is that of the KL to the teacher, wherever the teacher's logprobs come from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from conftest import build_tiny_model
from support.rollouts import make_group, make_rollout
from support.tiny_policy import live_policy, reference
from support.whole_steps import Keep

import tandem
from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.config.sections import Teacher
from tandem.errors import ConfigError, EngineError
from tandem.optimizers.adamw import AdamW
from tandem.rollout.teacher import ServedTeacher, judged
from tandem.rollout.template import Template
from tandem.trainer.pack import Packer
from tandem.trainer.step import LocalWork, Objective, Step
from tandem.types import Rollout, Sampling

PROMPT = list(b"What is 3 + 4?")


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


def log_probabilities(model: Any) -> torch.Tensor:
    """Of every token after the prompt, in float64."""
    return torch.log_softmax(model(input_ids=torch.tensor([PROMPT])).logits[0, -1], dim=-1)


@pytest.mark.parametrize("budget", [20, 4096], ids=["micro-batches", "one micro-batch"])
def test_gradient_of_all_answers_by_their_probability_is_that_of_the_kl(
    tiny_model: Path, teacher_model: Path, budget: int
) -> None:
    """One answer for each token of the vocabulary: the expectation is a sum, and nothing is left to chance."""
    exact, teacher = reference(tiny_model, torch.float64), reference(teacher_model, torch.float64)
    ours, theirs = log_probabilities(exact), log_probabilities(teacher).detach()
    kl = (ours.exp() * (ours - theirs)).sum()
    kl.backward()
    sampled = ours.tolist()
    shares = [math.exp(p) for p in sampled]
    group = make_group("t@0", [make_rollout(f"t@0/{n}", [(PROMPT, [n], [p])], 0.0) for n, p in enumerate(sampled)])

    async def score(tokens: Sequence[int]) -> list[float]:
        return [0.0] * (len(PROMPT) - 1) + [float(theirs[tokens[-1]])]

    def expected(rollout: Rollout) -> Rollout:
        assert rollout.advantages is not None
        token = rollout.turns[0].completion.tokens[0]
        share = shares[token] * len(sampled)  # of which the step takes the mean
        return replace(rollout, advantages=(rollout.advantages[0] * share,))

    with_advantages = asyncio.run(judged(group, score))
    mean = sum(share * r.metrics["kl_teacher"] for share, r in zip(shares, with_advantages.rollouts, strict=True))
    assert mean == pytest.approx(kl.item(), rel=1e-9)
    weighed = replace(with_advantages, rollouts=tuple(map(expected, with_advantages.rollouts)))
    with live_policy(tiny_model) as policy:
        keep = Keep()
        work = LocalWork(
            policy=policy, objective=Objective(loss=Reinforce()), stepper=keep, sampling=Sampling()  # type: ignore[arg-type]
        )  # fmt: skip
        packer = Packer(
            advantage=DrGrpo(), reduction="token", max_tokens=4, budget=budget, mask_truncated=False,
            device=policy.device, skip_zero=True,
        )  # fmt: skip
        step = Step(work=work, optimizer=AdamW(), steps=1)
        asyncio.run(step.forward_backward(packer([weighed], version=0)))
        right = dict(exact.named_parameters())
        for name, parameter in policy.model.named_parameters():
            gap = (keep.total[id(parameter)] - right[name].grad).norm() / right[name].grad.norm()
            assert gap < 1e-4, name


def test_turns_that_go_on_from_one_another_are_scored_at_once() -> None:
    scored_lengths: list[int] = []

    async def score(tokens: Sequence[int]) -> list[float]:
        scored_lengths.append(len(tokens))
        return [-float(place) for place in range(1, len(tokens))]

    turns = [([1, 2], [3, 4], [-1.0, -1.0]), ([1, 2, 3, 4, 5], [6], [-2.0]), ([9], [8, 7], [0.0, 0.0])]
    group = asyncio.run(judged(make_group("t@0", [make_rollout("t@0/0", turns, 1.0)]), score))
    assert scored_lengths == [3, 6]
    assert group.rollouts[0].advantages == (-1.0, -2.0, -3.0, -1.0, -2.0)


class Server:
    """vLLM's two endpoints, as far as a teacher asks."""

    def __init__(self, tokenizer: Any = None, rows: int = 0):
        self.tokenizer, self.rows, self.away = tokenizer, rows, 1

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 64})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert request.headers["Authorization"] == "Bearer secret"
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("big", 1, 0)
        rows: list[Any] = [None]
        rows += [{str(token): {"logprob": -token / 10, "rank": 1}} for token in body["prompt"][1:]]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": rows[: len(rows) - self.rows] or None}]})


async def served(server: Server, template: Template, tokens: Sequence[int]) -> list[float]:
    app = web.Application()
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    teacher = ServedTeacher.of(Teacher(url=f"http://127.0.0.1:{port}/v1", model="big", key_variable="TEACHERS_KEY"))
    try:
        await teacher.check(template)
        return await teacher.score(tokens)
    finally:
        await teacher.client.close()
        await runner.cleanup()


def test_served_teacher_scores_by_prompt_logprobs(
    tiny_model: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="TEACHERS_KEY is not set"):
        ServedTeacher.of(Teacher(url="http://127.0.0.1:1", key_variable="TEACHERS_KEY"))
    monkeypatch.setenv("TEACHERS_KEY", "secret")
    right = template._tokenizer
    assert asyncio.run(served(Server(right), template, [5, 7, 11])) == [-0.7, -1.1]
    with pytest.raises(EngineError, match="gives no prompt_logprobs"):
        asyncio.run(served(Server(right, rows=3), template, [5, 7, 11]))

    class Other:
        def encode(self, text: str, **options: Any) -> list[int]:
            return [1, 2, 3]

    with pytest.raises(ConfigError, match="another tokenizer than the policy"):
        asyncio.run(served(Server(Other()), template, [5]))


@pytest.mark.slow
def test_policy_comes_nearer_to_a_teacher_of_its_own_vocabulary(
    tiny_model: Path, teacher_model: Path, tmp_path: Path
) -> None:
    run = tandem.train(
        model=str(tiny_model), teacher=str(teacher_model), env={"kind": "arithmetic", "max_number": 9}, steps=12,
        groups_per_step=4, group_size=8, sampling={"max_tokens": 6}, optimizer={"lr": 3e-3}, loss="reinforce",
        dtype="float32", evaluate={"tasks": 0}, loggers=[], threads=1, runs=str(tmp_path),
    )  # fmt: skip
    kl = run.metrics.column("env/arithmetic/kl_teacher")
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3])
