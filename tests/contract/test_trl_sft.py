"""Supervised steps against TRL's trainer: which tokens are trained, the loss, and the gradient of every weight.

``trl_sft.json`` holds what TRL 1.13 computed in float64; ``tests/contract/trl_sft.py`` wrote it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from contract.trl_sft import SETS, model, sketch, tokenizer
from support.tiny_policy import live_policy
from support.whole_steps import Keep

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.grpo import Grpo
from tandem.envs.data.chats import chats
from tandem.envs.data.rows import DataSource
from tandem.metrics import flatten
from tandem.model.penalties import Penalties
from tandem.optimizers.adamw import AdamW
from tandem.rollout.demonstrations import Demonstrator
from tandem.rollout.template import Template
from tandem.trainer.pack import Packer, samples_of
from tandem.trainer.step import LocalWork, Objective, Step
from tandem.types import Group, Sampling

TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_sft.json").read_text(encoding="utf-8"))
HOSTILE = Sampling(top_p=0.3, repetition_penalty=1.7, min_tokens=3, max_tokens=4, regex="a+")
"""What the policy's own answers are sampled with has no part in what a given reply costs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trl") / "model"
    model().save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


@pytest.mark.parametrize("budget", [40, 4096], ids=["micro-batches", "one micro-batch"])
@pytest.mark.parametrize("kind", list(SETS))
def test_demonstrations_train_the_tokens_and_the_gradient_of_trl(
    folder: Path, tmp_path: Path, kind: str, budget: int
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, SETS[kind])), encoding="utf-8")
    tasks = chats(DataSource(path=str(file), test_share=0.0), "train")
    with live_policy(folder) as policy:
        demonstrator = Demonstrator(template=Template(policy.tokenizer, {}), context=512)
        rollouts = [demonstrator(None, task, f"{task.id}/0") for task in tasks]
        assert all(rollouts)
        groups = [Group(id=r.id, index=0, env="data", rollouts=(r,)) for r in rollouts if r is not None]
        samples = [sample for group in groups for sample in samples_of(group.rollouts[0], 0.0)]
        for sample, of_trl in zip(samples, TRL[kind]["sequences"], strict=True):
            assert list(sample.tokens) == of_trl["tokens"]
            assert list(sample.mask) == [bool(it) for it in of_trl["trained"]]

        packer = Packer(
            advantage=DrGrpo(), reduction="constant", max_tokens=4, budget=budget, mask_truncated=True,
            device=policy.device, penalties=Penalties.of(HOSTILE, [257]), skip_forced=True,
        ).supervising()  # fmt: skip
        keep = Keep()
        work = LocalWork(
            policy=policy,
            objective=Objective(loss=Grpo(), corrections=(TokenCorrection(),), recomputed=True),
            stepper=keep,  # type: ignore[arg-type]
            sampling=HOSTILE,
        )
        batch = packer(groups, version=0)
        assert (len(batch.micro) > 1) == (budget == 40)
        step = Step(work=work, optimizer=AdamW(), steps=1, warm_steps=1)
        stats = asyncio.run(step.forward_backward(batch))
        assert flatten(stats.metrics) == {"loss": pytest.approx(TRL[kind]["loss"], rel=1e-5)}
        for name, parameter in policy.model.named_parameters():
            expected = TRL[kind]["gradients"][name]
            assert sketch(keep.total[id(parameter)]) == pytest.approx(expected, rel=1e-4, abs=1e-5 * expected[0]), name
