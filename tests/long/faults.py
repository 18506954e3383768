"""Injects faults into publishes to a real vLLM and shows that each is caught within one publish, and by what.

    .venv/bin/python tests/long/faults.py [--engine-python PYTHON] [--ways "shared full" ...] [--json FILE]
    .venv/bin/python tests/long/faults.py --model .cache/smollm2 --dtype bfloat16      # pretrained instead of random
    .venv/bin/python tests/long/faults.py --ranks 2          # two engines, the fault in that of rank 1, a follower

One engine, or one for each rank, serves them all. After every fault it must either give out nothing or answer exactly
as before it, and the next publish must succeed, be proven and be what tokens of every engine are sampled from. Exits
with 1 if a fault was missed, or caught by something else than it should be. The engine runs where torch finds an
accelerator, else on the CPU. Of two ranks the second has a policy of its own in this process, and does what a follower
does; ways that pairs refuse (broadcast, hotswap) publish to both engines from rank 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fault_cases import WAYS, Fault, NotInjected, caught_by

from tandem.distributed.placement import visible_accelerators
from tandem.engines.base import EngineRequirements, ReceivesBroadcast
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError, SyncError
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer.ranks.follow import AdapterOfRank
from tandem.transport.bridge import VllmBridge
from tandem.types import Completion, PolicyVersion, Sampling
from tandem.weight_sync import shared
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.broadcast import Broadcast
from tandem.weight_sync.hotswap import Hotswap
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.session import WeightSyncSession
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.noise import LogprobComparison, scale

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()
RANK = 8
NOISE = 0.02 if CUDA else 1e-3
"""Most rounding of a logit in float32, nats."""
NUDGES = {"made up": {"full": 0.1, "lora": 1.0}, "pretrained": {"full": 0.03, "lora": 1.0}}
"""How far weights are moved at each publish, in standard deviations of each tensor."""
BUSY = 1000
"""Requests that an engine is said to have besides, so that another is asked."""
PROMPT = "Count: one, two, three, four, five, six, seven."
SAMPLING = Sampling(temperature=0.8, max_tokens=6)


@dataclass(frozen=True, kw_only=True)
class FaultyVllm(Vllm):
    """Tandem's engine with the subclasses of ``faulty`` in place of its two own classes."""

    def command(
        self, requirements: EngineRequirements, context: int, *, model: str, port: int, number: int = 0
    ) -> list[str]:
        command = super().command(requirements, context, model=model, port=port, number=number)
        ours = {"--worker-extension-cls": "faulty.Worker", "--middleware": "faulty.Routes", "--max-loras": "5"}
        for option, value in {**ours, "--max-cpu-loras": "5"}.items():
            command[command.index(option) + 1] = value
        return command

    def _environment(self, requirements: EngineRequirements, folder: Path, index: int, key: str) -> dict[str, str]:
        environment = super()._environment(requirements, folder, index, key)
        alone = folder / "logs" / "faulty-path"  # that file and nothing else: an engine must not find the others here
        alone.mkdir(parents=True, exist_ok=True)
        link = alone / "faulty.py"
        if not link.is_symlink():
            link.symlink_to(HERE / link.name)
        environment["PYTHONPATH"] += f"{os.pathsep}{alone}"
        return environment


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the table."""

    way: str
    fault: str
    expected: str
    caught_by: str
    seconds: float
    then: str
    """What the engine gave out afterwards."""
    error: str

    @property
    def right(self) -> bool:
        """Caught, by what should catch it, and nothing wrong was given out."""
        return self.caught_by == self.expected and not self.then.startswith("WRONG")


class SecondRank:
    """Rank 1 of two, a follower: a policy of its own, by the parts that do it in a follower's process."""

    def __init__(self, lead: Policy, policy: Policy, trainable: Trainable):
        self.lead, self.policy, self.trainable = lead, policy, trainable
        self.adapter = AdapterOfRank(trainable, policy)

    @property
    def slot(self) -> Any:
        """Where it writes its adapter."""
        return self.adapter._writer

    def views(self, export: Any) -> Mapping[str, torch.Tensor]:
        """Its engine's weights."""
        return dict(msgspec.convert(export, VllmBridge).attach())

    def trained(self) -> Trained:
        """What the lead has."""
        return Trained(self.trainable, self.lead)

    async def attach(self, exports: Sequence[Any], fresh: bool) -> None:
        """As of a follower."""
        own, views = self.trainable.base_names(self.policy.model), self.views(exports[0])
        write: Callable[[], None] = lambda: None  # noqa: E731 - a session keeps the state, not a follower
        await self.policy.compute(shared.attach, self.policy.model, own, views, fresh=fresh, write=write)

    async def adapt(self, slots: Sequence[Any]) -> None:
        """As of a follower."""
        await self.policy.compute(self.adapter.write, slots[0])

    async def fold(self, mine: Coroutine[Any, Any, None]) -> None:
        """Nothing is merged here."""
        await mine

    @torch.no_grad()
    def gather(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Have all that the lead has, as after an update."""
        for (_, theirs), (_, own) in zip(parameters, self.trainable.parameters(self.policy.model), strict=True):
            own.copy_(theirs)


class Bench:
    """One way of one policy to the engines; the last one is the faulty one."""

    def __init__(
        self,
        engine: Any,
        policy: Policy,
        trainable: Trainable,
        sync: WeightSync,
        folder: Path,
        *,
        nudge: float,
        second: SecondRank | None = None,
    ):
        self.engine, self.policy, self.trainable, self.second = engine, policy, trainable, second
        self.link = self._session(sync, folder)
        self.step = int(engine.version().step)
        self._random = torch.Generator().manual_seed(0)
        self._size = nudge
        self._start: list[torch.Tensor] = []
        self._prompt = policy.tokenizer.encode(PROMPT)

    def _session(self, sync: WeightSync, folder: Path) -> WeightSyncSession:
        return WeightSyncSession(
            sync=sync,
            policy=self.policy,
            engine=self.engine,
            trainable=self.trainable,
            folder=folder,
            ranks=self.second,
        )

    @property
    def server(self) -> Any:
        """The faulty engine over HTTP."""
        return self.engine.servers[-1]

    @property
    def slot(self) -> Any:
        """Where its adapter is written."""
        return self.engine._writer if self.second is None else self.second.slot

    def gather(self) -> None:
        """Have every rank hold what the lead does."""
        if self.second is not None:
            self.second.gather(self.parameters())

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained."""
        return self.trainable.parameters(self.policy.model)

    def nudge(self) -> None:
        """Stands for the optimizer: every trained tensor is put near where it was at first, by its own size or a fixed
        one, so that versions differ by more than rounding and a pretrained model stays one."""
        if not self._start:
            self._start = [p.detach().clone() for _, p in self.parameters()]
        with torch.no_grad():
            for (_, p), start in zip(self.parameters(), self._start, strict=True):
                noise = torch.randn(p.shape, generator=self._random).to(p)
                p.copy_(start + noise * (self._size * max(float(start.float().std()), 0.02)))

    async def publish(self, then: Callable[[], None] = lambda: None) -> None:
        """One step, and one answer sampled after it."""
        self.step += 1
        async with self.link.commit(self.step):
            await self.policy.compute(self.nudge)
            await self.policy.compute(then)
            await self.policy.compute(self.gather)
        await self.answer()

    async def answer(self, server: int = -1) -> Completion:
        """A completion by the faulty engine, or another; the same weights give the same."""
        others = [other for other in self.engine.servers if other is not self.engine.servers[server]]
        for other in others:
            other.outstanding += BUSY  # the least busy one is asked
        try:
            completion: Completion = await self.engine.generate(self._prompt, SAMPLING, 7)
        finally:
            for other in others:
                other.outstanding -= BUSY
        return completion

    async def publish_well(self) -> None:
        """Publish; tokens of every engine must carry the new version and be what the policy gives."""
        await self.publish()
        for server in range(len(self.engine.servers)):
            await self._right(await self.answer(server))

    async def _right(self, completion: Completion) -> None:
        if set(completion.versions) != {self.step}:
            raise AssertionError(f"after a good publish of {self.step} tokens carry {completion.versions}")
        whole = [*self._prompt, *completion.tokens]
        ours = await self.policy.compute(self.policy.score, whole, SAMPLING.temperature)
        answer = LogprobComparison(completion.logprobs, tuple(ours[len(self._prompt) - 1 :]), SAMPLING.temperature)
        if not scale(answer.residuals()) < (NOISE if self.policy.dtype == torch.float32 else 0.3):
            raise AssertionError(f"after a good publish tokens are off by up to {answer.worst():g} nats")

    async def strike(self, way: str, fault: Fault) -> Outcome:
        """Inject one fault; then show that the engine is harmless, and mend it."""
        kept = [p.detach().clone() for _, p in self.parameters()]
        before, error, seconds = [await self.answer(i) for i in range(len(self.engine.servers))], None, 0.0
        async with fault.inject(self):
            begun = time.monotonic()
            try:
                await (self.publish() if fault.act is None else fault.act(self))
            except NotInjected:
                raise
            except Exception as raised:
                error = raised
            seconds = time.monotonic() - begun
        found_by = "MISSED" if error is None else caught_by(error)
        then = "nothing" if error is None else await self._afterwards(before)
        if wrong := await self._mended(kept, rebind=fault.rebind):
            then = f"WRONG: no publish succeeds any more: {wrong}"
        return Outcome(
            way=way,
            fault=fault.name,
            expected=fault.by,
            caught_by=found_by,
            seconds=round(seconds, 2),
            then=then,
            error="" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:300],
        )

    async def _mended(self, kept: list[torch.Tensor], *, rebind: bool) -> str:
        """Bring back weights that are good and publish them; empty, or why that failed."""
        wrong = ""
        for attempt in range(2):
            try:
                await self.engine.recover()
                if rebind or attempt:
                    await self.link.bind(fresh=False)
                await self.policy.compute(self._restore, kept)
                await self.publish_well()
            except Exception as error:
                if attempt:
                    raise
                wrong = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                break
        return wrong

    def _restore(self, kept: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for (_, p), value in zip(self.parameters(), kept, strict=True):
                p.copy_(value)
        self.gather()

    async def _afterwards(self, before: Sequence[Completion]) -> str:
        """What the faulty engine gives out after a fault that was caught, or another one where that is wrong."""
        verdicts = [await self._given_out(server, completion) for server, completion in enumerate(before)]
        return next((verdict for verdict in verdicts if verdict.startswith("WRONG")), verdicts[-1])

    async def _given_out(self, server: int, before: Completion) -> str:
        try:
            async with asyncio.timeout(1.0):
                now = await self.answer(server)
        except (TimeoutError, EngineError, SyncError):
            return "nothing"
        if now.tokens == before.tokens and now.versions == before.versions:
            return "as before"
        if now.versions == (self.step,) * len(now.versions) and self.link.engine.version().step == self.step:
            return "the new version"  # the publish was repeated, and proven
        return f"WRONG: {now} instead of {before}"

    async def opened(self) -> None:
        """Begin anew, as a resumed run does."""
        kept = self.link
        self.link = self._session(kept.sync, kept.folder)
        try:
            await self.link.bind(fresh=True)
            self.step += 1
            async with self.link, self.link.open(PolicyVersion(step=self.step, digest="")):
                pass
        finally:
            self.link = kept
            self.engine.on_restart(kept.recover)

    async def greet(self) -> None:
        """What a trainer asks of an engine that it finds."""
        await self.engine.fleet._check_server(self.server)

    async def replace_engine(self) -> None:
        """Somebody ends the engine and starts one like it on the same port."""
        instance_id = self.server.instance_id
        await self.server.process.stop()
        await self.engine.fleet._spawn(len(self.engine.servers) - 1)
        self.server.instance_id = instance_id  # we were not told

    async def find_engine(self) -> None:
        """What a resumed run does: it sees that this is another engine, and publishes to it."""
        await self.greet()
        self.engine.fleet.restart_count += 1
        self.engine._swapped.clear()


@asynccontextmanager
async def way(
    engine: Any, name: str, model: Path, folder: Path, dtype: torch.dtype, *, kind: str
) -> AsyncIterator[Bench]:
    """A policy of its own, bound and published to the engine."""
    how, what = name.split()
    sync: WeightSync = {
        "shared": Shared(),
        # gloo, since trainer and engine may have to share one GPU, which NCCL does not do
        "broadcast": Broadcast(timeout_seconds=10.0 if CUDA else 4.0, bucket_mb=1, backend="gloo"),
        "hotswap": Hotswap(),
    }[how]
    trainable: Trainable = Full() if what == "full" else Lora(rank=RANK, alpha=2 * RANK)
    device = torch.device("cuda" if CUDA and how != "shared" else "cpu")
    compute = Compute(1)

    def load() -> Any:
        torch.manual_seed(0)
        return trainable.prepare(load_model(str(model), dtype=dtype, device=device)).eval()

    async def loaded() -> Policy:
        return Policy(await compute(load), load_tokenizer(str(model)), name=str(model), compute=compute)

    try:
        policy, second = await loaded(), None
        if how == "shared" and len(engine.servers) > 1:
            second = SecondRank(policy, await loaded(), trainable)
        bench = Bench(engine, policy, trainable, sync, folder, nudge=NUDGES[kind][what], second=second)
        await bench.link.bind(fresh=False)
        await compute(bench.nudge)  # an adapter that is all zeros would prove nothing
        await compute(bench.gather)
        bench.step += 1
        async with bench.link, bench.link.open(PolicyVersion(step=bench.step, digest="")):
            await bench.publish_well()
            await bench.publish_well()
            yield bench
    finally:
        compute.close()


def write_model(folder: Path, dtype: torch.dtype) -> Path:
    """A random Llama of 5 MB whose head is its own and whose vocabulary is padded, with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(bytes_)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|pad|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template="{{ messages }}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64 if CUDA else 32, max_position_embeddings=512, initializer_range=0.1,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_untied(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A pretrained model with a head of its own and one token more, which engines pad: the same logprobs."""
    model: Any = load_model(str(source), dtype=dtype, device=torch.device("cpu"))
    model.set_attn_implementation("sdpa")
    rows = model.get_input_embeddings().weight
    padded = torch.cat((rows, rows[10:11])).detach()  # a token that is hardly ever said
    model.config.tie_word_embeddings = False
    model.resize_token_embeddings(len(padded), mean_resizing=False)
    model.lm_head.weight = torch.nn.Parameter(padded.clone())
    model.get_input_embeddings().weight = torch.nn.Parameter(padded.clone())
    model.save_pretrained(folder)
    load_tokenizer(str(source)).save_pretrained(folder)
    return folder


async def run(args: argparse.Namespace, folder: Path, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Every fault of every way, on one engine for each rank."""
    dtype = getattr(torch, args.dtype)
    model = write_untied(args.model, folder / "model", dtype) if args.model else write_model(folder / "model", dtype)
    # The model runs where the scheduler does, on a CPU too, so that both die together.
    alone = {} if CUDA else {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
    spec = FaultyVllm(
        python=args.engine_python,
        enforce_eager=True,
        max_num_seqs=16,
        kv_cache_gb=0.25,
        gpu_memory_utilization=0.1,
        control_seconds=60.0,
        linger_seconds=5.0,
        seeded=True,
        replicas=args.ranks,
        devices=tuple(visible_accelerators(os.environ)[: args.ranks]) if CUDA and args.ranks > 1 else (),
        args=alone,
    )
    requirements = EngineRequirements(
        model=str(model),
        dtype=args.dtype,
        folder=folder,
        payload="adapter",  # with room for adapters it can be published to in all ways
        rank=RANK,
        capability=ReceivesBroadcast,
    )
    outcomes = []
    policy = Policy(None, load_tokenizer(str(model)), name="", compute=Compute(1))  # type: ignore[arg-type]
    policy.__class__ = type("Ends", (Policy,), {"end_tokens": frozenset({policy.tokenizer.eos_token_id})})
    async with spec.open(policy, context=512, requirements=requirements) as engine:
        for name in args.ways:
            kind = "pretrained" if args.model else "made up"
            async with way(engine, name, model, folder, dtype, kind=kind) as bench:
                for fault in WAYS[name]:
                    if args.only and args.only not in fault.name:
                        continue
                    outcomes.append(await bench.strike(name, fault))
                    report(outcomes[-1])
    policy.close()
    return outcomes


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    local = HERE.parents[1] / ".venv-engine" / "bin" / "python"
    parser.add_argument("--engine-python", default=None if CUDA or not local.exists() else str(local))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="each with an engine, the last faulty")
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--dtype", default="bfloat16" if CUDA else "float32", choices=("bfloat16", "float32"))
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; by default a made-up one of 5 MB")
    parser.add_argument("--json", type=Path, help="write one line for each fault here")
    parser.add_argument("--folder", type=Path, help="keep model, logs and adapters here")
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    def report(outcome: Outcome) -> None:
        mark = "ok  " if outcome.right else "FAIL"
        what = f"{mark} {outcome.way:15} {outcome.fault:52}"
        print(f"{what} {outcome.caught_by:14} {outcome.seconds:6.2f} s  {outcome.then}", flush=True)
        if not outcome.right:
            print(f"     expected: {outcome.expected}; said: {outcome.error}", flush=True)
        if args.json:
            record = {**asdict(outcome), "right": outcome.right}
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-faults-") as temporary:
        outcomes = asyncio.run(run(args, args.folder or Path(temporary), report))
    right = sum(outcome.right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} faults caught within one publish, in {time.monotonic() - begun:.0f} s")
    return 0 if right == len(outcomes) and outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
