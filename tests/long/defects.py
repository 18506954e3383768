"""Defects that somebody could write, one at a time, and the tests that are to notice each.

``before`` is a text that stands once in ``file``; ``after`` is the fault in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

ADVANTAGES = "tests/unit/test_advantages.py tests/contract/test_advantages.py"
CORRECTIONS = "tests/contract/test_corrections.py"
LOSSES = "tests/unit/test_losses.py tests/unit/test_losses_formulas.py"
OBJECTIVE = "tests/unit/test_objective.py tests/unit/test_step_objective.py"
OPTIMIZERS = "tests/unit/test_optimizers.py tests/contract/test_optimizers.py"
PACK = "tests/unit/test_pack.py tests/unit/test_objective.py"
REWARDS = "tests/unit/test_rewards.py tests/contract/test_rewards.py"
SYNC = "tests/unit/test_sync.py tests/contract/test_sync.py"


@dataclass(frozen=True)
class Defect:
    """A fault in one file."""

    name: str
    file: str
    before: str
    after: str
    tests: str
    """Selection of pytest, relative to the repository; words are split as a shell does."""


DEFECTS = (
    # advantages, losses, corrections, references
    Defect(
        "GRPO divides by n",
        "src/tandem/algorithms/advantages/grpo.py",
        'len(values) - (self.std == "sample")',
        "len(values)",
        ADVANTAGES,
    ),
    Defect(
        "RLOO counts itself",
        "src/tandem/algorithms/advantages/rloo.py",
        "len(values) / max(1, len(values) - 1)",
        "1.0",
        ADVANTAGES,
    ),
    Defect(
        "MaxRL takes negative rewards",
        "src/tandem/algorithms/advantages/maxrl.py",
        "min(rewards) < 0",
        "min(rewards) < -1e9",
        ADVANTAGES,
    ),
    Defect(
        "GDPO is not standardised over the step",
        "src/tandem/algorithms/advantages/gdpo.py",
        "[value / (std + self.eps) for value in group_values]",
        "list(mine)",
        ADVANTAGES,
    ),
    Defect("clips are swapped", "src/tandem/algorithms/losses/_ratio.py", "1.0 + high)", "1.0 + low)", LOSSES),
    Defect(
        "policy gradient has the wrong sign",
        "src/tandem/algorithms/losses/reinforce.py",
        "loss_N=-micro.advantages_N",
        "loss_N=micro.advantages_N",
        LOSSES,
    ),
    Defect(
        "CISPO's cap has a gradient",
        "src/tandem/algorithms/losses/cispo.py",
        "with torch.no_grad():",
        "with torch.enable_grad():",
        LOSSES,
    ),
    Defect(
        "dual clip is off",
        "src/tandem/algorithms/losses/_ratio.py",
        "advantages_N < 0, most,",
        "advantages_N < 0, math.inf,",
        LOSSES,
    ),
    Defect(
        "a mask lets everything through",
        "src/tandem/algorithms/corrections/base.py",
        "(ratio >= lowest) & (ratio <= highest)",
        "(ratio >= lowest) | (ratio <= highest)",
        CORRECTIONS,
    ),
    Defect(
        "geometric takes the sum",
        "src/tandem/algorithms/corrections/geometric.py",
        "micro.means(drift",
        "micro.totals(drift",
        CORRECTIONS,
    ),
    Defect(
        "OPSM masks good answers",
        "src/tandem/algorithms/corrections/opsm.py",
        "micro.advantages_N >= 0",
        "micro.advantages_N <= 0",
        CORRECTIONS,
    ),
    Defect(
        "KL estimator k3 has the wrong sign",
        "src/tandem/algorithms/references/base.py",
        "(-d_N).clamp(-_MOST, _MOST)) + d_N",
        "d_N.clamp(-_MOST, _MOST)) - d_N",
        f"{OBJECTIVE} tests/contract/test_references.py",
    ),
    Defect(
        "the reference's average is turned round",
        "src/tandem/algorithms/references/average.py",
        "mul_(1 - self._options.mixup)",
        "mul_(self._options.mixup)",
        f"{OBJECTIVE} tests/contract/test_references.py",
    ),
    # optimizers
    Defect(
        "warm-up ends a step late",
        "src/tandem/optimizers/base.py",
        "(1.0 - least) * step / self.warmup_steps",
        "(1.0 - least) * (step - 1) / self.warmup_steps",
        OPTIMIZERS,
    ),
    Defect(
        "the gradient's norm is a sum",
        "src/tandem/optimizers/base.py",
        "torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)",
        "torch.cat(norms).sum(dtype=torch.float64)",
        OPTIMIZERS,
    ),
    Defect(
        "a step's micro-batches overwrite one another",
        "src/tandem/optimizers/_precise.py",
        "self.buffer.add_(grad)",
        "self.buffer.copy_(grad)",
        OPTIMIZERS,
    ),
    # trainer
    Defect(
        "sequence reduction forgets the length",
        "src/tandem/trainer/pack.py",
        "1.0 / (num_samples * length)",
        "1.0 / num_samples",
        PACK,
    ),
    Defect("a token predicts itself", "src/tandem/trainer/pack.py", "groups[g][i].at - 1]", "groups[g][i].at]", PACK),
    Defect(
        "truncated answers are trained though masked",
        "src/tandem/trainer/pack.py",
        "self.mask_truncated and rollout.truncated",
        "False and rollout.truncated",
        PACK,
    ),
    Defect(
        "the cost ignores corrections",
        "src/tandem/trainer/objective.py",
        "cost_N = cost_N * weights_N",
        "cost_N = cost_N * weights_N.mean()",
        OBJECTIVE,
    ),
    Defect(
        "beta is ignored", "src/tandem/trainer/objective.py", "self.reference.beta * penalty_N", "penalty_N", OBJECTIVE
    ),
    Defect(
        "ess divides by nothing",
        "src/tandem/metrics.py",
        "self.sum * self.sum / (self.n * self.squares)",
        "self.sum * self.sum / self.squares",
        f"{OBJECTIVE} tests/unit/test_loop.py",
    ),
    Defect(
        "means of means",
        "src/tandem/metrics.py",
        "Mean(self.sum + other.sum, self.n + other.n)",
        "Mean((self.sum + other.sum) / 2, self.n)",
        "tests/unit/test_pack.py tests/unit/test_step.py tests/unit/test_buffer.py",
    ),
    Defect(
        "a checkpoint forgets the random state",
        "src/tandem/trainer/checkpoint.py",
        "rng = tuple(torch.get_rng_state().tolist())",
        "rng: tuple[int, ...] = ()",
        "tests/unit/test_checkpoint.py",
    ),
    Defect(
        "a checkpoint that is written while training goes on holds live tensors",
        "src/tandem/trainer/staging.py",
        "return tensor.detach().clone()",
        "return tensor.detach()",
        "tests/unit/test_checkpoint.py",
    ),
    Defect(
        "a checkpoint forgets the optimizer",
        "src/tandem/trainer/checkpoint.py",
        "state_shards.read(path / SHARDS if (path / SHARDS).is_dir() else path / WHOLE, shares)",
        "pass",
        "tests/unit/test_checkpoint.py",
    ),
    Defect(
        "another recipe's checkpoint is taken",
        "src/tandem/trainer/checkpoint.py",
        "state.config_digest != fresh.config_digest",
        "False",
        "tests/unit/test_checkpoint.py",
    ),
    Defect(
        "a damaged file passes",
        "src/tandem/trainer/digests.py",
        "_digest(there[name]) != digest",
        "False",
        "tests/unit/test_checkpoint.py",
    ),
    Defect(
        "two trainers share a folder",
        "src/tandem/trainer/run_lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/unit/test_lock_and_signals.py",
    ),
    # rollout
    Defect(
        "a resume forgets what it drew again",
        "src/tandem/rollout/data_state.py",
        "return msgspec.convert(data, cls, str_keys=True)",
        'return msgspec.convert({**data, "again": []}, cls, str_keys=True)',
        "tests/unit/test_buffer.py tests/unit/test_checkpoint.py tests/unit/test_reuse.py",
    ),
    Defect(
        "flat groups are kept",
        "src/tandem/rollout/buffer.py",
        "if not self.options.drop_zero_variance:",
        "if self.options.drop_zero_variance:",
        "tests/unit/test_buffer.py",
    ),
    Defect(
        "stale groups are trained",
        "src/tandem/rollout/buffer.py",
        "self.version() - entry.group.version_min > most",
        "self.version() - entry.group.version_min > most + 1",
        "tests/unit/test_buffer.py",
    ),
    Defect(
        "sampling runs a batch ahead",
        "src/tandem/rollout/buffer.py",
        "last = self._freed + self._lag_control.lag",
        "last = self._freed + self._lag_control.lag + 1",
        "tests/unit/test_buffer.py",
    ),
    Defect(
        "a replayed group is never too old",
        "src/tandem/rollout/replay.py",
        "<= self._options.max_age",
        "<= 2 * self._options.max_age",
        "tests/unit/test_reuse.py",
    ),
    Defect(
        "pass@k with replacement",
        "src/tandem/rollout/measure.py",
        "1.0 - math.comb(samples - solved, k) / math.comb(samples, k)",
        "1.0 - (1.0 - solved / samples) ** k",
        "tests/unit/test_evaluate.py",
    ),
    # policy
    Defect(
        "a nucleus is one token short",
        "src/tandem/model/sampling.py",
        "(mass_MK < top_p_N[open_M, None]).sum(-1)",
        "((mass_MK < top_p_N[open_M, None]).sum(-1) - 1).clamp(min=0)",
        "tests/unit/test_sampling.py",
    ),
    Defect(
        "min_p is not a logarithm",
        "src/tandem/model/sampling.py",
        "min_p_N.log()",
        "min_p_N",
        "tests/unit/test_sampling.py",
    ),
    Defect(
        "presence counts",
        "src/tandem/model/penalties.py",
        "(output_NW > 0) * presence",
        "output_NW * presence",
        "tests/unit/test_penalties.py",
    ),
    # engines
    Defect(
        "min_tokens is off by one",
        "src/tandem/engines/embedded/engine.py",
        "len(request.tokens) > request.sampling.min_tokens",
        "len(request.tokens) > request.sampling.min_tokens + 1",
        "tests/unit/test_embedded.py tests/contract/test_engines.py",
    ),
    Defect(
        "an answer is one token long",
        "src/tandem/engines/embedded/engine.py",
        "len(request.tokens) >= request.limit",
        "len(request.tokens) > request.limit",
        "tests/unit/test_embedded.py tests/contract/test_engines.py",
    ),
    Defect(
        "token ids above the vocabulary pass",
        "src/tandem/engines/vllm/server/limits.py",
        "<= max(tokens) < self.vocabulary",
        "<= max(tokens) <= self.vocabulary",
        "tests/unit/test_vllm_limits.py",
    ),
    Defect(
        "a pause's lease is not renewed",
        "src/tandem/engines/vllm/server/frontend.py",
        "self.hold()\n        loop, now",
        "if self.runs:\n            return\n        loop, now",
        "tests/unit/test_vllm_lease.py",
    ),
    Defect(
        "what somebody else paused goes on",
        "src/tandem/engines/vllm/client/engine.py",
        'state == "paused" and before == "serving"',
        'state == "paused"',
        "tests/unit/test_vllm_pauses.py",
    ),
    # sync and weights
    Defect(
        "a missing tensor is alike",
        "src/tandem/weight_sync/verify/probe.py",
        "if engine_sums.get(name) != value]",
        "if engine_sums.get(name, value) != value]",
        SYNC,
    ),
    Defect(
        "the digest is not compared",
        "src/tandem/weight_sync/transaction/session.py",
        "version.digest and version.digest != actual",
        "False",
        SYNC,
    ),
    Defect(
        "a failed publish leaves the engine as it is",
        "src/tandem/weight_sync/transaction/session.py",
        "await self.engine.stop(reason)",
        "await self.engine.resume()",
        SYNC,
    ),
    Defect(
        "a restarted engine is not bound again",
        "src/tandem/weight_sync/transaction/session.py",
        "if not self._recovery.is_bound:  # it was",
        "if False:  # it was",
        SYNC,
    ),
    Defect(
        "adapters of an earlier life stay",
        "src/tandem/weight_sync/hotswap.py",
        "if later.name >= folder.name:",
        "if later.name > 'step-~':",
        SYNC,
    ),
    Defect(
        "a checksum ignores rows",
        "src/tandem/transport/checksums.py",
        "(by_row * a[top : top + len(by_row)]).sum()",
        "by_row.sum()",
        "tests/unit/test_checksums.py",
    ),
    Defect(
        "a bucket overlaps the next tensor",
        "src/tandem/transport/buckets.py",
        "self.size = start + size",
        "self.size = start + size // 2",
        "tests/unit/test_collective.py tests/contract/test_sync.py",
    ),
    # broker
    Defect(
        "a lease never expires",
        "src/tandem_broker/queue/leases.py",
        "lease.expires <= now",
        "lease.expires < 0",
        "tests/unit/test_broker_store.py",
    ),
    Defect(
        "the environment's key trains",
        "src/tandem_broker/server/keys.py",
        'if known and role == "environment":',
        "if known:",
        "tests/unit/test_broker_app.py tests/unit/test_broker_owners.py",
    ),
    Defect(
        "a batch may be too small",
        "src/tandem_broker/queue/formation.py",
        "return None if rest is None else taken + rest",
        "return taken + (rest or [])",
        "tests/unit/test_broker_formation.py",
    ),
    Defect(
        "a duplicate is accepted",
        "src/tandem_broker/queue/store.py",
        "if key is not None and key in self.seen:",
        "if False:",
        "tests/unit/test_broker_store.py",
    ),
    # rewards
    Defect(
        "overlong rewards length",
        "src/tandem/rewards/overlong.py",
        "-min(1.0, over / self.cache)",
        "min(1.0, over / self.cache)",
        REWARDS,
    ),
    Defect(
        "numbers may be used twice",
        "src/tandem/rewards/countdown.py",
        "numbers <= allowed)",
        "set(numbers) <= set(allowed))",
        REWARDS,
    ),
    # recipe
    Defect(
        "an override may come twice",
        "src/tandem/config/override.py",
        "elif key in values:",
        "elif False:",
        "tests/unit/test_config.py",
    ),
    Defect(
        "the clip's default is wide",
        "src/tandem/algorithms/losses/grpo.py",
        "clip_high: float = 0.28",
        "clip_high: float = 2.8",
        "tests/unit/test_losses.py tests/unit/test_losses_formulas.py tests/unit/test_schema.py "
        "tests/unit/test_config.py tests/contract/test_losses.py tests/contract/test_trl.py",
    ),
    # compat, report, alarms
    Defect(
        "Axolotl's correction has another cap",
        "src/tandem_compat/axolotl/rules.py",
        "recipe.get(cap, 3.0)",
        "recipe.get(cap, 2.0)",
        "tests/unit/test_compat_golden.py",
    ),
    Defect(
        "ms-swift's overlong has no floor",
        "src/tandem_compat/swift/rewards.py",
        "-max(0.0, (rollout.num_tokens",
        "-max(-1.0, (rollout.num_tokens",
        "tests/unit/test_swift.py tests/unit/test_swift_plugins.py",
    ),
    Defect(
        "a report's change overlaps its interval",
        "src/tandem/observability/report/summary.py",
        'after["ci"][0] > before["ci"][1]',
        'after["ci"][1] > before["ci"][0]',
        "tests/unit/test_report.py tests/unit/test_show.py",
    ),
    Defect(
        "alarms are told at once and always",
        "src/tandem/observability/alarms.py",
        "step - self.notified >= self.again",
        "step - self.notified >= 0",
        "tests/unit/test_alarms.py",
    ),
    Defect(
        "off policy is judged as on policy",
        "src/tandem/observability/alarms.py",
        "limit = 0.3 if off_policy else 0.05",
        "limit = 0.05",
        "tests/unit/test_alarms.py",
    ),
)
