"""Router replay: passes whose experts are the sampler's, from the engine's answer to the gradient."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from support.families import config_of
from support.rollouts import make_group, make_rollout
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.engines.base import EngineRequirements
from tandem.engines.embedded.spec import Embedded
from tandem.engines.vllm.server.frontend import PartialCompletion, RequestRecord
from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError, EngineError
from tandem.metrics import Sum
from tandem.model import layers, packing, routing
from tandem.model.attention import Packed, sequential_positions
from tandem.model.policy import Compute, Policy
from tandem.rollout.source import DataState, Draw
from tandem.trainer.pack import Packer
from tandem.trainer.ranks.work import of_plain, to_plain
from tandem.trainer.state import TrainerState
from tandem.trainer.step import LocalWork, Objective
from tandem.types import Completion, PolicyVersion, Sampling

PLAN = Packed(lengths=(6, 4, 5), parents=(None, 0, 0))
TOKENS = torch.arange(5, 20)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = config_of(name)
    options = packing.attention(config, "auto")
    return packing.causal_class(config).from_config(config, dtype=dtype, **options).eval()


def passed(model: Any, experts_TLK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logprobs of a packed row's tokens, and the gradient of their sum of squares."""
    plan = replace(PLAN, experts_TLK=experts_TLK)
    positions = torch.as_tensor(sequential_positions(plan))
    hidden = packing.hidden(model, TOKENS[None], positions[None], plan)[0]
    logprobs = model.get_output_embeddings()(hidden).log_softmax(-1).take_along_dim(TOKENS[:, None] + 1, 1)[:, 0]
    parameters = list(model.parameters())
    parts = torch.autograd.grad(logprobs.square().sum(), parameters, allow_unused=True, materialize_grads=True)
    return logprobs.detach(), torch.cat([part.flatten() for part in parts])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
def test_layers_that_tell_their_experts_share_what_the_compiler_makes() -> None:
    model, frames, chosen = model_of("qwen3_moe"), list[int](), list[Any]()
    experts = routing.of(model)
    assert experts is not None
    assert len(model.model.layers) > 2
    for some in (model.model.layers[:1], model.model.layers):
        torch._dynamo.reset()
        counted = CompileCounterWithBackend("eager")
        with mock.patch.object(layers, "decoder_layers", return_value=list(some)):
            layers.tune(model, compile=True, backend=cast(Any, counted))
        passed(model, None)
        frames.append(counted.frame_count)
        chosen.append(experts.chosen())
    assert frames[0] == frames[1]
    assert np.array_equal(*chosen)
    assert chosen[0].any()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])  # the last is packed plainly
def test_replay_of_a_models_own_choice_changes_nothing(name: str) -> None:
    model = model_of(name)
    plain = passed(model, None)
    experts = routing.of(model)
    assert experts is not None
    if name == "gpt_oss":  # its last batch is not the row
        own = torch.full((15, experts.layers, experts.top_k), routing.OWN)
    else:
        own = torch.from_numpy(experts.rows(experts.chosen().tobytes()))
    again = passed(model, own)
    assert torch.equal(plain[0], again[0])
    assert torch.allclose(plain[1], again[1], rtol=1e-6, atol=1e-6 * float(plain[1].abs().max()))
    other = passed(model, (own + 1) % experts.num_experts)
    assert (other[0] - plain[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_layers_that_are_computed_again_choose_what_their_pass_was_told(name: str, checkpointing: Any) -> None:
    model = model_of(name)
    experts = routing.of(model)
    assert experts is not None
    choice = np.random.default_rng(0).random((15, experts.layers, experts.num_experts)).argsort(axis=2)
    told_TLK = torch.from_numpy(choice[..., : experts.top_k]).to(torch.int16)
    kept = passed(model, told_TLK)
    layers.tune(model, compile=False, checkpointing=checkpointing)
    again = passed(model, told_TLK)
    assert torch.equal(kept[0], again[0])
    assert torch.allclose(kept[1], again[1], rtol=1e-6, atol=1e-6 * float(kept[1].abs().max()))


def test_replayed_layer_is_what_a_plain_loop_computes() -> None:
    model = model_of("qwen3_moe", torch.float64)
    model.set_experts_implementation("eager")  # others do not know float64
    block, experts = model.model.layers[2].mlp, routing.of(model)
    assert experts is not None
    hidden_TH = torch.randn(7, 64, dtype=torch.float64)
    chosen_TLK = torch.from_numpy(np.random.default_rng(0).random((7, 4, 8)).argsort(axis=2)[..., :2])
    experts.replay(chosen_TLK.to(torch.int16))
    out_TH = block(hidden_TH[None])[0]
    scores_TE = (hidden_TH @ block.gate.weight.T).softmax(-1)
    expected = []
    for hidden_H, scores_E, chosen_K in zip(hidden_TH, scores_TE, chosen_TLK[:, 2], strict=True):
        weights_K = scores_E[chosen_K] / (scores_E[chosen_K].sum() if block.gate.norm_topk_prob else 1.0)
        parts = []
        for weight, i in zip(weights_K, chosen_K, strict=True):
            gate, up = (block.experts.gate_up_proj[i] @ hidden_H).chunk(2)
            parts.append(weight * (block.experts.down_proj[i] @ (torch.nn.functional.silu(gate) * up)))
        expected.append(torch.stack(parts).sum(0))
    # transformers scores in float32
    assert torch.allclose(out_TH, torch.stack(expected), rtol=0, atol=1e-6 * float(out_TH.detach().abs().max()))
    of_router = [torch.autograd.grad(x.square().sum(), block.gate.weight)[0] for x in (out_TH, torch.stack(expected))]
    assert of_router[1].abs().max() > 1e-4
    assert torch.allclose(*of_router, rtol=0, atol=1e-5 * float(of_router[1].abs().max()))


def test_replay_lowers_the_mismatch_of_a_sampler_in_bfloat16_at_least_threefold() -> None:
    sampler, trainer = model_of("qwen3_moe", torch.bfloat16), model_of("qwen3_moe")
    trainer.load_state_dict(sampler.state_dict())  # the same values, and other rounding of what is computed by them
    tokens_T = torch.randint(3, 299, (401,), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def logprobs(model: Any, experts_TLK: Tensor | None = None) -> Tensor:
        plan = Packed(lengths=(400,), parents=(None,), experts_TLK=experts_TLK)
        hidden_TH = packing.hidden(model, tokens_T[None, :-1], torch.arange(400)[None], plan)[0]
        logits_TV = model.get_output_embeddings()(hidden_TH).float()
        return logits_TV.log_softmax(-1).take_along_dim(tokens_T[1:, None], 1)[:, 0]

    sampled_T = logprobs(sampler)
    routed = routing.of(sampler)
    assert routed is not None
    gaps = [logprobs(trainer, e) - sampled_T for e in (None, torch.from_numpy(routed.rows(routed.chosen().tobytes())))]
    apart, replayed = (float((torch.expm1(gap_T) - gap_T).mean()) for gap_T in gaps)
    assert apart > 3 * replayed > 0  # 9.7e-4 and 2.9e-5 were seen


def test_experts_travel_from_the_embedded_engine_into_a_packed_row() -> None:
    model = model_of("qwen3_moe")
    model.generation_config.eos_token_id = None
    policy = Policy(model, SimpleNamespace(eos_token_id=None), name="", compute=Compute(1))
    experts = routing.of(model)
    assert experts is not None

    async def answers() -> list[Completion]:
        wants = EngineRequirements(model="", dtype="float32", router_replay=True)
        async with Embedded().open(policy, context=64, requirements=wants) as engine:
            requests = [engine.generate([5, 6, 7, 8], Sampling(max_tokens=n), key=n) for n in (4, 6)]
            return list(await asyncio.gather(*requests))

    completions = asyncio.run(answers())
    turns = [[((5, 6, 7, 8), c.tokens, c.logprobs)] for c in completions]
    rollouts = [make_rollout(f"g/{i}", turns[i], float(i)) for i in range(2)]
    routed = [
        replace(r, turns=(replace(r.turns[0], completion=c),)) for r, c in zip(rollouts, completions, strict=True)
    ]
    pack = Packer(
        advantage=DrGrpo(),
        reduction="token",
        max_tokens=8,
        budget=100,
        mask_truncated=False,
        device=torch.device("cpu"),
        routing=experts,
    )
    for group in (routed, rollouts):
        (micro,) = pack([make_group("g", group)], version=0).micro
        packing.hidden(model, micro.tokens_T[None], micro.positions_T[None], replace(micro.plan, experts_TLK=None))
        own = torch.from_numpy(experts.rows(experts.chosen().tobytes()))
        expected = own if group is routed else torch.full_like(own, routing.OWN)  # nobody said
        assert micro.plan.experts_TLK is not None
        assert torch.equal(micro.plan.experts_TLK, expected)
    load_RE = experts.load()
    assert load_RE is not None
    assert load_RE.sum(1).tolist() == [2.0 * len(micro.tokens_T)] * 4
    policy.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # the second is packed plainly
def test_the_load_balancing_loss_is_transformers_own_of_each_token_once(name: str) -> None:
    model, own = model_of(name), model_of(name)
    own.set_attn_implementation("eager")
    experts, gates = routing.of(model), routing.of(own)
    function = routing.balance_function(type(own))
    assert experts is not None
    assert gates is not None
    assert function is not None
    experts.balance()
    packing.hidden(model, TOKENS[None], torch.as_tensor(sequential_positions(PLAN))[None], PLAN)
    loss = experts.balance_loss(model)
    gradients = torch.autograd.grad(loss, [router.weight for router in experts.routers.values()])
    rows = [TOKENS[:10], torch.cat([TOKENS[:6], TOKENS[10:]])]
    logits = [own(input_ids=row[None], output_router_logits=True).router_logits for row in rows]
    joined = tuple(torch.cat([first, second[6:]]) for first, second in zip(*logits, strict=True))
    expected = function(joined, gates.num_experts, gates.top_k)
    wanted = torch.autograd.grad(expected, [router.weight for router in gates.routers.values()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for got, want in zip(gradients, wanted, strict=True):
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_adds_the_load_balancing_loss_by_each_micro_batch_share(checkpointing: Any) -> None:
    model = model_of("qwen3_moe")
    layers.tune(model, compile=False, checkpointing=checkpointing)
    model.train()
    experts = routing.of(model)
    policy = Policy(model, SimpleNamespace(eos_token_id=None), name="", compute=Compute(1))
    turns = [[((5, 6, 7, 8), (9, 10, 11), (-1.0,) * 3)], [((5, 6, 7, 8), (12, 13), (-1.0,) * 2)]]
    group = make_group("g", [make_rollout(f"g/{i}", turn, float(i)) for i, turn in enumerate(turns)])
    pack = Packer(
        advantage=DrGrpo(), reduction="token", max_tokens=8, budget=7, mask_truncated=False, device=policy.device
    )
    batch = pack([group], version=0)
    assert sorted(micro.share for micro in batch.micro) == [pytest.approx(5 / 11), pytest.approx(6 / 11)]
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients, metric = [], 0.0
    for balance in (0.0, 0.5):
        stepper: Any = SimpleNamespace(accumulate=lambda parameter: None)  # gradients stay, and add up
        work = LocalWork(
            policy=policy, objective=Objective(loss=Grpo()), stepper=stepper, sampling=Sampling(), balance=balance
        )
        model.zero_grad()
        metrics, _, _ = asyncio.run(work.passed(batch, (), lambda: None))
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights])
        metric = sum(cast(Sum, of["moe/aux_loss"]).value for of in metrics if "moe/aux_loss" in of)
    total = torch.zeros(())
    for micro in batch.micro:
        packing.hidden(model, micro.tokens_T[None], micro.positions_T[None], micro.plan)
        assert experts is not None
        total = total + micro.share * experts.balance_loss(model)
    assert metric == pytest.approx(total.item(), rel=1e-5)
    of_loss = torch.autograd.grad(0.5 * total, weights, allow_unused=True, materialize_grads=True)
    for without, with_it, own in zip(*gradients, of_loss, strict=True):
        assert torch.allclose(with_it - without, own, rtol=1e-4, atol=1e-6 * float(with_it.abs().max()))
    assert max(float(own.abs().max()) for own in of_loss) > 1e-5
    policy.close()


def test_a_model_without_a_load_balancing_loss_is_refused() -> None:
    packing.check_balance(config_of("qwen3_moe"))
    for name in ("llama", "deepseek_v3"):
        with pytest.raises(ConfigError, match=f"router_aux_loss_coef: a {name} model has no load-balancing loss"):
            packing.check_balance(config_of(name))


def test_experts_of_another_model_are_refused() -> None:
    experts = routing.of(model_of("qwen3_moe"))
    assert experts is not None
    for routed in (bytes(7), bytes([8] * 8)):
        with pytest.raises(EngineError, match="4 layers with 2 of 8 experts"):
            experts.rows(routed)


def test_vllm_is_asked_for_experts_and_tells_them() -> None:
    wants = EngineRequirements(model="m", dtype="float32", router_replay=True)
    assert "--enable-return-routed-experts" in Vllm().command(wants, 64, "m", 1)
    record = RequestRecord([PartialCompletion()])
    routed = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    part: dict[str, Any] = {"index": 0, "token_ids": [1, 2], "finish_reason": "stop", "logprobs": None, "text": ""}
    part |= {"routed_experts": routed}
    record.add(SimpleNamespace(prompt_logprobs=None, num_cached_tokens=0, outputs=[SimpleNamespace(**part)]), 0)
    assert record.completions[0].experts == routed.tobytes()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", "it has no router beside its experts"),
        ("phimoe", "layer 0 chooses its experts otherwise than by torch.topk"),
        ("deepseek_v2", "give those that they would not choose no weight"),
    ],
)
def test_models_whose_experts_cannot_be_chosen_are_refused(name: str, why: str) -> None:
    packing.check_replay(config_of("qwen3_moe"))
    with pytest.raises(ConfigError, match=f"router_replay: a {name} model's experts cannot be chosen: .*{why}"):
        packing.check_replay(config_of(name))


def test_experts_survive_a_resume_and_the_way_to_another_rank() -> None:
    rollout = make_rollout("g/0", [((1, 2), (3,), (-1.0,))], 1.0)
    completion = replace(rollout.turns[0].completion, experts=bytes(range(250)))
    group = make_group("g", [replace(rollout, turns=(replace(rollout.turns[0], completion=completion),))])
    state = TrainerState(
        step=1,
        version=PolicyVersion(step=1, digest=""),
        tokens_seen=1,
        data_state=DataState(ready=((Draw(env="sums", number=0), group),)),
        config_digest="",
    )
    again = TrainerState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.data_state.ready[0][1] == group
    plan = replace(PLAN, experts_TLK=torch.arange(-2, 58, dtype=torch.int16).reshape(15, 2, 2))
    sent = of_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(plan))))
    assert torch.equal(sent.experts_TLK, plan.experts_TLK)
