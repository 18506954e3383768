"""Groups that environments elsewhere sampled and scored, taken from a broker a batch at a time.

What was trained is a matter of the checkpoint. A batch is leased, and acknowledged once a checkpoint is on disk whose
data state knows what became of each of its groups: trained, dropped, or kept here for the next step. A run that died
goes on from its checkpoint; what it took after that comes again, for its training was lost too. A broker without
leases (Atropos' own) gives every batch once: what a killed run took after its last checkpoint is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, ReportsChecksums
from tandem.errors import BrokerError, Deadline, Starved, message_of
from tandem.metrics import Sum, Value, merge
from tandem.observability import waits
from tandem.observability.answers import change
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.wandb import Wandb
from tandem.printable import named
from tandem.rollout.measure import measure
from tandem.rollout.source import Batch, DataState, Draw
from tandem.rollout.template import Template
from tandem.rollout.turns import differing
from tandem.together import cancel
from tandem.trainer.environments import StepCounter, dropped
from tandem.types import Group, Rollout
from tandem_broker.client import Connection, NotRegistered, TakenBatch, TrainerClient, key_in
from tandem_broker.protocol.convert import Notes, Rules, group_from_wire, sequences
from tandem_broker.protocol.messages import RunParameters, ScoredGroup

log = logging.getLogger(f"tandem.{__name__}")

MOST_NAMED = 8
"""Groups of one batch that are named where they cannot be read."""
QUIET_SECONDS = 30.0
"""After so long without a batch, or twice as long as one took before, a run says what it waits for."""
_COUNTED = (
    *(f"groups/dropped_{reason}" for reason in ("zero_variance", "stale", "failed")),
    *(f"rollouts/{kind}" for kind in ("malformed", "too_long", "untrained")),
    "groups/malformed",
)
"""Metrics that count what arrived since the last look."""


def broker_source(
    config: RunConfig,
    *,
    folder: Path,
    context: int,
    vocabulary: int,
    template: Template,
    trained: StepCounter,
    telemetry: Telemetry,
    engine: Engine,
) -> BrokerSource:
    """The source of rollouts that other environments hand to a broker.

    Args:
        config: of the run; it has a broker.
        folder: the run's; environments keep what is theirs beneath it.
        context: most tokens of a sequence.
        vocabulary: token ids of the model are below this.
        template: tells the text of tokens.
        trained: the policy step.
        telemetry: is told of dropped groups.
        engine: what the environments sample from.

    Raises:
        ConfigError: the broker's key is not set.
    """
    options = config.broker
    assert options is not None
    if ReportsChecksums not in config.engine.capabilities:
        log.warning("environments elsewhere cannot sample from an engine within the trainer; they need engine: vllm")
    rules = Rules(
        max_tokens=context,
        vocabulary=vocabulary,
        temperature=config.sampling.temperature,
        env_advantages=options.env_advantages,
        policy_logprobs=options.missing_logprobs == "policy",
        decode=template.decode,
    )
    return BrokerSource(
        broker=TrainerClient(Connection(options.url, key_in(options.key_variable, "broker.key_variable"))),
        config=config,
        run=_parameters(config, folder, context),
        version=trained.current,
        on_drop=dropped(config, trained, telemetry),
        failure=lambda: engine.failure,
        lease_seconds=options.lease_seconds,
        rules=rules,
    )


def _parameters(config: RunConfig, folder: Path, context: int) -> RunParameters:
    board = next((logger for logger in config.loggers if isinstance(logger, Wandb)), None)
    return RunParameters(
        wandb_group=(board.group or "") if board else "",
        wandb_project=board.project if board else "",
        batch_size=config.groups_per_step * config.group_size,
        max_token_len=context,
        checkpoint_dir=str(folder.absolute()),
        save_checkpoint_interval=config.checkpoint.every,
        starting_step=0,
        num_steps=config.steps,
    )


@dataclass(slots=True, kw_only=True)
class BrokerSource:
    """Rollout source of a broker's groups. ``version`` returns the policy step that training has reached."""

    broker: TrainerClient
    """Where they come from; opened with the source."""
    config: RunConfig
    """Of the run."""
    run: RunParameters
    """What the broker is told of the run, but for its step."""
    version: Callable[[], int]
    """Optimizer steps taken."""
    on_drop: Callable[[str, Group], None]
    """Told of every dropped group and why: zero_variance, stale or failed."""
    failure: Callable[[], Exception | None]
    """Error after which no engine samples from the policy, so that no more groups come; None while one does."""
    lease_seconds: float
    """How long the broker waits for a trainer that says nothing more; what is held is renewed long before."""
    rules: Rules
    """How a group is read."""
    poll_seconds: float = 0.25
    """Between two questions for a batch that is not there yet."""
    max_dropped_batches: int = 50
    """Batches' worth of groups dropped in a row before giving up."""
    _ready: list[Group] = field(default_factory=list)
    _leased: dict[str, frozenset[str]] = field(default_factory=dict)
    _received: int = 0
    _measured: list[Mapping[str, Value]] = field(default_factory=list)
    _in_a_row: int = 0
    _logged: set[str] = field(default_factory=set)
    _quiet_seconds: float = QUIET_SECONDS

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[BrokerSource]:
        """Tell the broker what the checkpoint remembers, and register where ``data_state`` stands."""
        self._received, self._leased = data_state.admitted, dict.fromkeys(data_state.batches, frozenset())
        self._ready = [group for _, group in data_state.ready]
        async with self.broker:
            # First: registering sends back every batch that is still leased, and these were trained on.
            await self.saved(data_state)
            await self._register()
            renewing = asyncio.create_task(self._renew(), name="leases")
            try:
                yield self
            finally:
                await cancel(renewing)

    async def take(self) -> Batch:
        """The groups that arrived first, as many as make up a batch.

        Raises:
            Starved: group after group was dropped.
            BrokerError: the broker stays away or refuses.
            EngineError: environments elsewhere have nothing to sample from any more.
        """
        while True:
            self._drop_stale()
            if (groups := self._batch()) is not None:
                del self._ready[: len(groups)]
                self._measured.append(measure(groups, full_marks))
                # Nothing waits for a step to end: environments elsewhere go on.
                return Batch(groups, position=self.data_state, free=lambda: None)
            taken = await self._next()
            if not taken.groups and taken.id is not None:
                await self.broker.acknowledge(taken.id)  # else it would come again with every resume
                taken = msgspec.structs.replace(taken, id=None)
            self._receive(taken)

    def data_state(self) -> DataState:
        """Where it stands now."""
        return DataState(
            admitted=self._received,
            ready=tuple((Draw(group.env, group.index), group) for group in self._ready),
            batches=tuple(self._leased),
        )

    async def saved(self, data_state: DataState) -> None:
        """Acknowledge the batches of which the checkpoint knows what became."""
        for batch in data_state.batches:
            if batch in self._leased and (reason := await self.broker.acknowledge(batch)):
                remedy = "give each trainer a broker of its own, raise broker.lease_seconds, or give the broker --data"
                log.warning("the broker does not count batch %s as trained by this run: %s; %s", batch, reason, remedy)
        self._leased = {batch: names for batch, names in self._leased.items() if batch not in data_state.batches}

    def metrics(self) -> Mapping[str, Value]:
        """What was taken or dropped since the last call: rewards, lengths, and drops by reason."""
        measured, self._measured = self._measured, []
        return merge([*measured, {name: Sum(0.0) for name in _COUNTED}])

    async def _register(self) -> None:
        """Say what is trained, and see that it was understood.

        Raises:
            BrokerError: it goes on with what an earlier trainer told it.
        """
        run = msgspec.structs.replace(self.run, starting_step=self.version())
        await self.broker.register(run)
        batch_size = (await self.broker.info()).batch_size
        if batch_size != run.batch_size:
            raise BrokerError(
                f"the broker serves batches of {batch_size} sequences and this run takes {run.batch_size}; restart the "
                "broker, or GET /reset_data, which also drops what is queued"
            )

    async def _renew(self) -> None:
        """Keep what is held from being served to others. Each lease is renewed twice before it would run out."""
        while True:
            await asyncio.sleep(self.lease_seconds / 3)
            for batch in tuple(self._leased):
                with contextlib.suppress(BrokerError, Deadline):  # one that is away is told of when a batch is needed
                    await self.broker.renew(batch)

    async def _next(self) -> TakenBatch:
        """The next batch, unless none will come any more."""
        async with waits.waiting("trainer", "needs groups to train on", on="environments of the broker"):
            polling = asyncio.create_task(self._poll(), name="the next batch")
            began = time.monotonic()
            try:
                while not polling.done():
                    if (failure := self.failure()) is not None:
                        raise failure
                    await asyncio.wait((polling,), timeout=self.poll_seconds)
                    if (seconds := time.monotonic() - began) > self._quiet_seconds:
                        self._quiet_seconds = 2 * seconds
                        what = f"no batch of {self.run.batch_size} sequences came from the broker"
                        log.warning("%s for %.0f s: its /status?detail=1 says why", what, seconds)
                return await polling
            finally:
                await cancel(polling)

    async def _poll(self) -> TakenBatch:
        """Ask until there is a batch."""
        while True:
            try:
                # A broker that knows how old a group is leaves stale ones out itself: its batches are then whole.
                lease, policy = self.lease_seconds, self.version()
                if taken := await self.broker.batch(lease=lease, policy=policy, max_lag=self.config.max_lag):
                    return taken
            except NotRegistered as error:
                log.warning("%s; registering again", error)
                await self._register()
            await asyncio.sleep(self.poll_seconds)

    def _receive(self, taken: TakenBatch) -> None:
        """Read a batch's groups; what can be trained on waits for its turn, and what cannot is set aside."""
        notes, now = Notes(), self.version()
        here = frozenset().union(*self._leased.values())
        arrived: list[Group] = []
        refused = list(taken.malformed)
        for scored, version, name in zip(taken.groups, taken.versions, taken.ids, strict=True):
            if name in here:  # it was not heard of us for as long as a lease lasts
                self._warn_once("again", f"group {name} came again while its first lease was held; it is trained once")
                continue
            index = self._received + len(arrived)
            task = named(str((scored.group_overrides or {}).get("tandem_task") or "group"))
            try:
                self._refuse_other(scored)
                group = group_from_wire(
                    scored,
                    # The broker's name for it is the same whenever it comes: also to a run that was killed meanwhile.
                    id=f"{task}@{name or index}",
                    index=index,
                    version=now if version is None else version,
                    rules=self.rules,
                    notes=notes,
                )
            except (BrokerError, ArithmeticError, ValueError) as error:  # the latter of values that no check expects
                refused.append(str(error) if isinstance(error, BrokerError) else message_of(error))
                continue
            if version is not None and version > now:
                why = "it is of another run, or of steps lost in a kill; GET /reset_data drops what is queued"
                self._warn_once(
                    "ahead", f"group {group.id} was sampled at step {version} and this run is at {now}: {why}"
                )
            arrived.append(group)
        self._received += len(arrived)
        if taken.id is not None:
            self._leased[taken.id] = frozenset(filter(None, taken.ids))
        self._count(notes, refused, arrived)
        if refused:
            self._untrained(len(refused), lambda: f"malformed); the last one: {refused[-1]}")
        for group in arrived:
            if (reason := self._fault(group)) is not None:
                self._drop(reason, group)
            else:
                self._in_a_row = 0
                self._ready.append(group)

    def _refuse_other(self, scored: ScoredGroup) -> None:
        """See that a group was sampled as the run computes its logprobs, where it says how.

        Raises:
            BrokerError: it was not.
        """
        for settings in (scored.generation_params, scored.group_overrides, *(scored.overrides or ())):
            if isinstance(settings, Mapping) and (name := differing(self.config.sampling, settings)) is not None:
                whose = named(str((scored.group_overrides or {}).get("tandem_env") or scored.env_id))
                raise BrokerError(
                    f"environment {whose} samples with {name} {settings[name]}, and this run computes logprobs with "
                    f"{getattr(self.config.sampling, name):g}; give both the same sampling.{name}"
                )

    def _count(self, notes: Notes, malformed: Sequence[str], arrived: Sequence[Group]) -> None:
        """Count what could not be read, and tell each kind of it once."""
        self._measured.append({f"rollouts/{kind}": Sum(float(count)) for kind, count in notes.failed.items()})
        self._measured.append({"groups/malformed": Sum(float(len(malformed)))})
        for error in malformed[:MOST_NAMED]:
            log.warning("a group of the broker cannot be trained on and is set aside: %s", error)
        for name in sorted(notes.unread):
            but = " (broker.env_advantages: true reads them)" * (name == "advantages")
            self._warn_once(name, f"environments send {name}, which is not read{but}")
        for env, rollout in ((group.env, r) for group in arrived for r in group.rollouts if r.error):
            self._warn_once(f"failed in {env}", f"sequence {rollout.id} of {env} is not trained on: {rollout.error}")

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s (told once)", message)

    def _fault(self, group: Group) -> str | None:
        """Why a group cannot be trained on. One with advantages of its own needs no siblings to compare with."""
        has_advantages = any(rollout.advantages is not None for rollout in group.scored)
        if len(group.scored) < (1 if has_advantages else 2):
            return "failed"
        if self._is_stale(group):
            return "stale"
        teaches = (has_advantages or not group.zero_variance) and any(rollout.trained for rollout in group.scored)
        return "zero_variance" if self.config.zero_variance_groups == "drop" and not teaches else None

    def _drop_stale(self) -> None:
        """Groups that have waited here for too long."""
        for group in [group for group in self._ready if self._is_stale(group)]:
            self._ready.remove(group)
            self._drop("stale", group)

    def _is_stale(self, group: Group) -> bool:
        return self.version() - group.version_min > self.config.max_lag

    def _drop(self, reason: str, group: Group) -> None:
        self._measured += [measure([group], full_marks), {f"groups/dropped_{reason}": Sum(1.0)}]
        self.on_drop(reason, group)
        most = self.config.sampling.max_tokens
        self._untrained(1, lambda: f"{reason}); of the last one, {group.id}: {change([(reason, group)], most)}")

    def _untrained(self, count: int, why: Callable[[], str]) -> None:
        """So many more in a row; raises Starved, which says why, when there are too many."""
        self._in_a_row += count
        if self._in_a_row > self.max_dropped_batches * self.config.groups_per_step:
            raise Starved(f"{self._in_a_row} groups in a row from the broker could not be trained on ({why()}")

    def _batch(self) -> list[Group] | None:
        """The first groups that have the sequences of a batch together; None if there are too few."""
        batch: list[Group] = []
        num = 0
        for group in self._ready:
            if num >= self.run.batch_size:
                break
            batch.append(group)
            num += sum(max(1, len(sequences(rollout))) for rollout in group.rollouts)  # as the broker counts it
        return batch if num >= self.run.batch_size else None


def full_marks(rollout: Rollout) -> bool:
    """True if its first reward is at least 1: what a right answer gets where the recipe names no rewards."""
    return next(iter(rollout.rewards.values()), 0.0) >= 1.0 - 1e-9
