"""The fault bench: publishes of every way to a real vLLM, in which something goes wrong (``fault_cases.py``).

Each fault must be caught within one publish, and by what is to catch it. After it the engine gives out nothing or
answers exactly as before, and the next publish must succeed, be proven and be what tokens of every engine are sampled
from. The engine runs where torch finds an accelerator, else on the CPU; the last of several is the faulty one.

With two ranks ways that share weights have an engine for each: the second has a policy of its own in this process and
does what a follower does. In all other ways the second rank is a process, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from fault_cases import WAYS, Fault, NotInjected, caught_by
from kills_engine import package

from tandem.config.loading import dump, from_options
from tandem.distributed.placement import visible_accelerators
from tandem.engines.base import EngineRequirements, ReceivesBroadcast, Relaunches
from tandem.engines.vllm.adapters import AdapterWriter
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError, SyncError
from tandem.model.policy import Policy, load_tokenizer
from tandem.trainable.base import Trainable
from tandem.trainer.ranks.lead import ManyRanks
from tandem.trainer.world import World, live_policy
from tandem.transport.bridge import VllmBridge
from tandem.types import Completion, PolicyVersion, Sampling
from tandem.weight_sync import shared
from tandem.weight_sync.transaction.session import WeightSyncSession
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.noise import LogprobComparison, scale

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()
RANK = 8
NOISE = 0.02 if CUDA else 1e-3
"""Most rounding of a logit in float32, nats."""
NUDGES = {"full": 0.1, "lora": 1.0, "merged": 1.0}
"""How far weights are moved at each publish, in standard deviations of each tensor."""
BUSY = 1000
"""Requests that an engine is said to have besides, so that another is asked."""
PROMPT = "Count: one, two, three, four, five, six, seven."
SAMPLING = Sampling(temperature=0.8, max_tokens=6)
LORA = {"kind": "lora", "rank": RANK, "alpha": 2 * RANK}
TRAINABLES: dict[str, Any] = {"full": "full", "lora": LORA, "merged": {**LORA, "merged": True}}
SYNCS: dict[str, Any] = {
    "shared": "shared",
    # gloo, since trainer and engine may have to share one GPU, which NCCL does not do
    "broadcast": {
        "kind": "broadcast",
        "timeout_seconds": 10.0 if CUDA else 4.0,
        "bucket_mb": 1,
        "backend": "gloo",
    },
    "hotswap": "hotswap",
    "restart": {"kind": "restart", "every": 1},
}


@dataclass(frozen=True, kw_only=True)
class FaultyVllm(Vllm):
    """Tandem's engine with the subclasses of ``faulty`` in place of its two own classes."""

    def command(
        self, requirements: EngineRequirements, context: int, model: str, port: int, number: int = 0
    ) -> list[str]:
        command = super().command(requirements, context, model, port, number)
        ours = {"--worker-extension-cls": "faulty.Worker", "--middleware": "faulty.Routes"}
        if requirements.payload == "adapter":
            ours |= {"--max-loras": "5", "--max-cpu-loras": "5"}
        for option, value in ours.items():
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
        if self.python == sys.executable:
            environment["PYTHONPATH"] += os.pathsep + os.pathsep.join(package(folder / "stand-in"))
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

    size = 2

    def __init__(self, lead: Policy, policy: Policy, trainable: Trainable):
        self.lead, self.policy, self.trainable = lead, policy, trainable
        self.writer, self.own = AdapterWriter(), Trained(trainable, policy)

    @property
    def slot(self) -> Any:
        """Where it writes its adapter."""
        return self.writer

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
        await self.policy.compute(lambda: self.writer.write(slots[0], self.own.adapter()))

    async def fold(self, mine: Coroutine[Any, Any, None]) -> None:
        """Nothing is merged here."""
        await mine

    async def gather(self) -> None:
        """Have all that the lead has, as after an update."""
        await self.policy.compute(self._copy)

    @torch.no_grad()
    def _copy(self) -> None:
        lead, own = (self.trainable.parameters(policy.model) for policy in (self.lead, self.policy))
        for (_, theirs), (_, mine) in zip(lead, own, strict=True):
            mine.copy_(theirs)


class Bench:
    """One way of one policy to the engines; the last one is the faulty one."""

    def __init__(self, engine: Any, world: World, folder: Path, *, nudge: float, second: SecondRank | None = None):
        self.engine, self.world, self.second = engine, world, second
        self.policy, self.trainable, self.folder = world.policy, world.config.trainable, folder
        self.link = self._session()
        self.step = int(engine.version().step)
        self._random = torch.Generator().manual_seed(0)
        self._size = nudge
        self._start: list[torch.Tensor] = []
        self._prompt = self.policy.tokenizer.encode(PROMPT)

    def _session(self) -> WeightSyncSession:
        return WeightSyncSession(
            sync=self.world.sync,
            policy=self.policy,
            engine=self.engine,
            trainable=self.trainable,
            folder=self.folder,
            ranks=self.second or self.world,
        )

    @property
    def server(self) -> Any:
        """The faulty engine over HTTP."""
        return self.engine.servers[-1]

    @property
    def slot(self) -> Any:
        """Where its adapter is written."""
        return self.engine._writers[0] if self.second is None else self.second.slot

    async def gather(self) -> None:
        """Have every rank hold what the lead does, a process by way of a file."""
        if self.second is not None:
            await self.second.gather()
        elif self.world.size > 1:
            path = self.folder / "of-lead"
            await self.policy.compute(self.trainable.save, self.policy.model, self.policy.tokenizer, path)
            await self.world.load_weights(path)

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
            await self.gather()
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
                await self.gather()
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
        self.link = self._session()
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
        """Somebody ends the engine and starts one like it on the same port, and a publish comes before a look at it."""
        instance_id, fleet = self.server.instance_id, self.engine.fleet
        fleet._watching.cancel()
        await self.server.process.stop()
        await fleet._spawn(len(self.engine.servers) - 1)
        self.server.instance_id = instance_id  # we were not told

    async def find_engine(self) -> None:
        """What a resumed run does: it sees that this is another engine, and publishes to it."""
        await self.greet()
        self.engine.fleet.restart_count += 1
        self.engine._swapped.clear()
        self.engine.fleet.watch(self.engine.fleet.republish)


@asynccontextmanager
async def way(engine: Any, name: str, model: Path, folder: Path, dtype: str, *, ranks: int) -> AsyncIterator[Bench]:
    """A policy of its own, bound and published to the engine."""
    how, what = name.split()
    pairs = ranks if how == "shared" else 1
    options: dict[str, Any] = {
        "model": str(model), "steps": 1, "env": "arithmetic", "dtype": dtype, "threads": 1, "compile": False,
        "trainable": TRAINABLES[what], "sync": SYNCS[how], "engine": "vllm", "ranks": ranks // pairs,
    }  # fmt: skip
    config = from_options(options, (), folder / "config.yaml").config
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    async with AsyncExitStack() as stack:
        opening = ManyRanks.connected(config, ranks, None, folder) if ranks > pairs else World.opened(config)
        world, second = await stack.enter_async_context(opening), None
        if pairs > 1:
            policy = await stack.enter_async_context(live_policy(config))
            second = SecondRank(world.policy, policy, config.trainable)
        bench = Bench(engine, world, folder, nudge=NUDGES[what], second=second)
        await bench.link.bind(fresh=False)
        await world.bind(None)
        await bench.policy.compute(bench.nudge)  # an adapter that is all zeros would prove nothing
        await bench.gather()
        bench.step += 1
        async with bench.link, bench.link.open(PolicyVersion(step=bench.step, digest="")):
            await bench.publish_well()
            await bench.publish_well()
            yield bench


def write_model(folder: Path, dtype: str) -> Path:
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
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def struck(
    name: str, folder: Path, *, ranks: int, python: str | None, dtype: str, only: str = ""
) -> AsyncIterator[Outcome]:
    """Every fault of one way, or those whose name has a word; where ranks share weights each has an engine.

    An engine of this very interpreter on a CPU is a stand-in, which has no adapters and is not struck where vLLM is.
    """
    model, how = write_model(folder / "model", dtype), name.split()[0]
    stands_in = python == sys.executable
    # The model runs where the scheduler does, on a CPU too, so that both die together.
    alone = {} if CUDA else {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
    spec = FaultyVllm(
        python=python,
        enforce_eager=True,
        max_num_seqs=16,
        kv_cache_gb=0.25,
        gpu_memory_utilization=0.1,
        control_seconds=60.0,
        linger_seconds=5.0,
        seeded=True,
        replicas=ranks if how == "shared" else 1,
        devices=tuple(visible_accelerators(os.environ)[:ranks]) if CUDA and ranks > 1 else (),
        args=alone,
    )
    requirements = EngineRequirements(
        model=str(model),
        dtype=dtype,
        folder=folder,
        payload="weights" if stands_in else "adapter",  # with room for adapters it can be published to in all ways
        rank=RANK,
        capability=Relaunches if how == "restart" else ReceivesBroadcast,
    )
    tokenizer = load_tokenizer(str(model))
    ends = SimpleNamespace(end_tokens=frozenset({tokenizer.eos_token_id}))
    async with (
        spec.open(ends, context=512, requirements=requirements) as engine,  # type: ignore[arg-type]
        way(engine, name, model, folder, dtype, ranks=ranks) as bench,
    ):
        for fault in WAYS[ranks][name]:
            if only in fault.name and not (stands_in and fault.vllm):
                yield await bench.strike(name, fault)
