"""Checkpoints: whole or not there, pruned, restored bit for bit, and clear about what cannot be read."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.full_disk import small_files

from tandem.algorithms.references.average import Average
from tandem.algorithms.references.base import ReferenceWeights
from tandem.errors import CheckpointError, RankError
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.optimizers.adamw import AdamW
from tandem.rollout.source import DataState, Draw
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer import checkpoint
from tandem.trainer.checkpoint import Checkpoints, restore_weights, staging_of
from tandem.trainer.state import TrainerState, checkpoints_in
from tandem.trainer.world import World
from tandem.types import Completion, Group, Message, PolicyVersion, Rollout, Task, Turn


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Iterator[Policy]:
    model = load_model(str(tiny_model), dtype=torch.float32, device=torch.device("cpu"))
    policy = Policy(Full().prepare(model), load_tokenizer(str(tiny_model)), name="tiny", compute=Compute(1))
    yield policy
    policy.close()


FULL = Full()


@pytest.fixture(params=[False, True], ids=["waited for", "behind"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    """Whether checkpoints are written while training goes on."""
    return bool(request.param)


class Saver:
    """Checkpoints of a tiny model, called without an event loop."""

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        *,
        every: int = 1,
        keep: int = 2,
        steps: int = 100,
        contents: Any = "all",
        trainable: Trainable = FULL,
        held: ReferenceWeights | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.saved: list[int] = []
        self.policy = policy
        self.stepper = AdamW(lr=1e-2).bind(trainable.parameters(policy.model))
        saved = SimpleNamespace(save=contents, every=every, keep=keep)
        config: Any = SimpleNamespace(checkpoint=saved, steps=steps, trainable=trainable)
        work: Any = SimpleNamespace(stepper=self.stepper, reference=held)
        lock: Any = SimpleNamespace(folder=folder, check=lambda: None)
        telemetry: Any = SimpleNamespace(event=lambda name, *, step, path: self.saved.append(step))
        self.trainable, self.held = trainable, held
        staging, world = staging_of(asynchronous, policy), World(config, policy)
        self.checkpoints = Checkpoints(world=world, work=work, lock=lock, staging=staging, telemetry=telemetry)

    def train(self, seed: int) -> None:
        """Some optimizer step."""
        draw = torch.Generator().manual_seed(seed)
        for _, parameter in self.trainable.parameters(self.policy.model):
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            self.stepper.accumulate(parameter)
        self.stepper.step(1e-2, 1.0)
        self.trainable.fold(self.policy.model)
        if self.held is not None:
            self.held.move()

    def save(self, step: int) -> Path:
        asyncio.run(self.checkpoints.save(state(step)))
        return self.checkpoints.folder / f"{step:06d}"

    def restore(self, digest: str = "recipe") -> TrainerState:
        """As a run does: the weights first, since binding them to an engine comes before the optimizer."""

        async def both() -> TrainerState:
            folder = self.checkpoints.folder
            restored = await restore_weights(folder, self.checkpoints.world, state(0, digest))
            await self.checkpoints.restore(restored)
            return restored

        return asyncio.run(both())

    def tensors(self) -> dict[str, torch.Tensor]:
        live = {**dict(self.policy.model.named_parameters()), **self.stepper.state_dict()}
        return {name: tensor.detach().clone() for name, tensor in live.items()}


def group() -> Group:
    task = Task(
        id="3+4", env="e", prompt=(Message(role="user", content="3 + 4?"),), answer="7", meta={"n": [1, {"a": None}]}
    )
    completion = Completion(tokens=(5, 6), logprobs=(-0.1, -1 / 3), versions=(1, 2), finish="stop")
    turn = Turn(prompt=(1, 2), completion=completion, temperature=0.7)
    rollouts = tuple(
        Rollout(
            id=f"3+4@0/{n}",
            task=task,
            turns=(turn,),
            messages=(*task.prompt, Message(role="tool", content="é")),
            status="ok",
            rewards={"number": 0.1 + 0.2},
            reward=reward,
            metrics={"calls": 1.0},
        )
        for n, reward in enumerate((1.0, None))
    )
    return Group(id="3+4@0", index=9, env="e", rollouts=rollouts)


def state(step: int, digest: str = "recipe") -> TrainerState:
    return TrainerState(
        step=step,
        version=PolicyVersion(step=step, digest="beef"),
        tokens_seen=17 * step,
        data_state=DataState(
            taken=3,
            drawn={"e": 12},
            admitted=14,
            again=(Draw("e", 9), Draw("e", 4)),
            ready=((Draw("e", 3), group()),),
        ),
        config_digest=digest,
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Round trip


def test_everything_is_restored_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    saver.train(1)
    torch.manual_seed(5)
    saver.save(3)
    before, drawn = saver.tensors(), torch.rand(4)
    saver.train(2)
    assert any(not torch.equal(before[name], tensor) for name, tensor in saver.tensors().items())
    other = Saver(policy, tmp_path)
    restored = other.restore()
    assert dataclasses.replace(restored, rng=()) == state(3)
    after = other.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.rand(4), drawn), "torch's generator goes on where it was"


def test_weights_are_restored_before_there_is_an_optimizer(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    saver.train(1)
    saver.save(3)
    before = saver.tensors()
    saver.train(2)
    moved = saver.stepper.state_dict()
    restored = asyncio.run(restore_weights(saver.checkpoints.folder, saver.checkpoints.world, state(0)))
    assert dataclasses.replace(restored, rng=()) == state(3)
    after = saver.tensors()
    names = dict(policy.model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert all(torch.equal(moved[name], after[name]) for name in moved), "the optimizer's states are restored apart"
    asyncio.run(saver.checkpoints.restore(restored))
    assert all(torch.equal(before[name], tensor) for name, tensor in saver.tensors().items())


def test_the_optimizers_states_are_those_of_the_state_that_was_found(policy: Policy, tmp_path: Path) -> None:
    """Also if a newer checkpoint appeared since."""
    saver = Saver(policy, tmp_path)
    saver.train(1)
    saver.save(1)
    before = {name: tensor.clone() for name, tensor in saver.stepper.state_dict().items()}
    saver.train(2)
    saver.save(2)
    asyncio.run(saver.checkpoints.restore(state(1)))
    assert all(torch.equal(before[name], tensor) for name, tensor in saver.stepper.state_dict().items())


def test_weights_are_an_ordinary_folder(policy: Policy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Saver(policy, tmp_path).save(1) / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, policy.head.weight)
    assert AutoTokenizer.from_pretrained(folder).chat_template == policy.tokenizer.chat_template


def test_whoever_may_read_the_folder_may_read_its_files(policy: Policy, tmp_path: Path) -> None:
    folder = Saver(policy, tmp_path).save(1)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {folder.stat().st_mode & 0o666}


def test_a_checkpoint_that_a_run_removed_meanwhile_is_said_to_be_gone(policy: Policy, tmp_path: Path) -> None:
    """As under an evaluation of a run that goes on, which has loaded libraries for seconds since it chose one."""
    with pytest.raises(CheckpointError, match="000012/model is gone: a run removes"):
        Full().load(policy.model, tmp_path / "checkpoints" / "000012" / "model")


# When, and how many


def test_saved_when_due_and_at_the_end(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path, every=3, keep=10, steps=8)
    for step in filter(saver.checkpoints.due, range(1, 9)):
        asyncio.run(saver.checkpoints.save(state(step)))
    assert saver.saved == [3, 6, 8]
    assert list(checkpoints_in(tmp_path / "checkpoints")) == [3, 6, 8]


def test_memory_that_a_checkpoint_needed_is_given_back(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator nothing else does: all states are copied to the host, and glibc would keep that."""
    trimmed: list[bool] = []
    monkeypatch.setattr("tandem.machine.trim", lambda: trimmed.append((tmp_path / "checkpoints" / "000001").exists()))
    Saver(policy, tmp_path).save(1)
    assert trimmed == [True]


def test_only_the_newest_are_kept_and_nothing_else_is_touched(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path, keep=2)
    (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
    for step in (1, 2, 3, 10):
        saver.save(step)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000003", "000010", "mine"]


def test_half_removed_checkpoint_does_not_bear_its_name(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process is killed while it prunes."""
    saver = Saver(policy, tmp_path, keep=1)
    saver.save(1)
    removed: list[str] = []

    def die(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            removed.append(Path(path).name)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            saver.save(2)
    assert removed == [".000001.tmp"]
    assert list(checkpoints_in(tmp_path / "checkpoints")) == [2]
    assert saver.restore().step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000002"], "leftovers are cleared away"


def test_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(policy, tmp_path, keep=1)
    saver.save(1)

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", refuse)
        saver.save(2)
    assert "000001 cannot be removed" in caplog.text


def test_saving_the_same_step_again_keeps_what_is_there(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    before = content(saver.save(1))
    saver.train(3)
    assert content(saver.save(1)) == before
    assert saver.saved == [1]


def test_weights_alone_can_be_used_and_not_gone_on_from(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path, contents="weights")
    path = saver.save(1)
    assert sorted(one.name for one in path.iterdir()) == ["model"]
    policy.model.load_state_dict(type(policy.model).from_pretrained(path / "model").state_dict())
    with pytest.raises(CheckpointError, match="holds weights alone"):
        saver.restore()


def test_where_nothing_is_saved_nothing_is_written(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path, contents="none", steps=3)
    assert not any(saver.checkpoints.due(step) for step in (1, 2, 3))
    assert not asyncio.run(saver.checkpoints.save(state(3)))
    assert saver.saved == []
    assert not (tmp_path / "checkpoints").exists()


# Failures while writing


def old_one_is_untouched(saver: Saver, before: dict[str, bytes], error: CheckpointError) -> None:
    folder = saver.checkpoints.folder
    assert [path.name for path in folder.iterdir()] == ["000001"]
    assert content(folder / "000001") == before
    assert saver.saved == [1]
    for phrase in ("step 2", str(folder), "newest checkpoint is step 1", f"tandem train {folder.parent}"):
        assert phrase in str(error)
    assert saver.restore().step == 1


def test_full_disk_at_any_file_leaves_the_old_checkpoint(policy: Policy, tmp_path: Path, asynchronous: bool) -> None:
    saver = Saver(policy, tmp_path, asynchronous=asynchronous)
    before = content(saver.save(1))
    sizes = sorted({len(data) for data in before.values()})
    assert len(sizes) > 4
    for size in sizes:
        # The first file that is as large as this, and in turn every other.
        with small_files(size - 1), pytest.raises(CheckpointError, match="cannot be written") as caught:
            saver.save(2)
        old_one_is_untouched(saver, before, caught.value)
    saver.save(2)


def test_full_disk_while_the_tokenizer_is_written(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library raises a bare Exception."""
    saver = Saver(policy, tmp_path)
    before = content(saver.save(1))
    save = policy.tokenizer.save_pretrained

    def limited(folder: Path) -> None:
        with small_files(1000):
            save(folder)

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", limited)
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        saver.save(2)
    assert type(caught.value.__cause__) is Exception
    old_one_is_untouched(saver, before, caught.value)


@pytest.mark.parametrize("place", ["mkdir", "write_text", "rename", "save_file"])
def test_failure_of_any_operation_leaves_the_old_checkpoint(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, asynchronous: bool
) -> None:
    saver = Saver(policy, tmp_path, asynchronous=asynchronous)
    before = content(saver.save(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if place == "save_file" else Path, place, full)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            saver.save(2)
    old_one_is_untouched(saver, before, caught.value)


def test_failure_to_reach_the_disk_leaves_the_old_checkpoint(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    saver = Saver(policy, tmp_path, keep=1, asynchronous=asynchronous)
    before = content(saver.save(1))
    calls = 0
    fsync, left = os.fsync, 0

    def counted(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > left:
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(checkpoint.os, "fsync", counted)
    for left in range(len(before) + 2):  # noqa: B007 - read by counted: files, two folders
        calls = 0
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            saver.save(2)
        old_one_is_untouched(saver, before, caught.value)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("rank 1: No space left"), CheckpointError), (RankError("rank 1 was lost"), RankError)],
)
def test_failure_of_another_rank_leaves_the_old_checkpoint(
    policy: Policy, tmp_path: Path, error: Exception, raised: type[Exception], asynchronous: bool
) -> None:
    saver = Saver(policy, tmp_path, asynchronous=asynchronous)
    before = content(saver.save(1))

    class Others(World):
        async def written(self) -> None:
            raise error

    saver.checkpoints.world = Others(saver.checkpoints.world.config, policy)
    with pytest.raises(raised, match="rank 1"):
        saver.save(2)
    assert [path.name for path in saver.checkpoints.folder.iterdir()] == ["000001"]
    assert content(saver.checkpoints.folder / "000001") == before
    assert saver.saved == [1]


def test_a_bug_is_not_dressed_as_a_full_disk(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(policy, tmp_path)
    saver.save(1)

    def wrong(*args: Any) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", wrong)
    with pytest.raises(AttributeError, match="a bug"):
        saver.save(2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_what_a_killed_process_left_is_no_checkpoint(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    saver.save(1)
    aside = tmp_path / "checkpoints" / ".000002.tmp"
    shutil.copytree(tmp_path / "checkpoints" / "000001", aside)
    assert list(checkpoints_in(tmp_path / "checkpoints")) == [1]
    assert saver.restore().step == 1
    assert not aside.exists()


# Written while training goes on


class Held:
    """Writers that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        write = checkpoint._write_each

        def held(*arguments: Any) -> None:
            self.begun.set()
            assert self.go.wait(30)
            write(*arguments)

        monkeypatch.setattr(checkpoint, "_write_each", held)


def trained_policy(folder: Path, trainable: Trainable, dtype: torch.dtype, compute: Compute) -> Policy:
    torch.manual_seed(0)
    model = load_model(str(folder), dtype=dtype, device=torch.device("cpu"))
    return Policy(trainable.prepare(model), load_tokenizer(str(folder)), name="tiny", compute=compute)


@pytest.mark.parametrize(
    ("trainable", "dtype"),
    [
        (Full(), torch.float32),
        (Full(layers=(1,)), torch.bfloat16),
        (Lora(rank=2), torch.bfloat16),
        (Lora(rank=2, merged=True), torch.float32),
    ],
    ids=["full", "a layer", "lora", "merged"],
)
def test_what_is_written_while_training_goes_on_is_the_step_that_was_saved(
    policy: Policy,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainable: Trainable,
    dtype: torch.dtype,
) -> None:
    """Byte for byte what a run that waits writes, random state and moving reference included."""
    moving = trained_policy(tiny_model, trainable, dtype, policy.compute)
    held = Average(beta=0.1, mixup=0.5).hold(trainable.parameters(moving.model))
    saver = Saver(moving, tmp_path / "waits", trainable=trainable, held=held)
    saver.train(1)
    torch.manual_seed(5)
    want = content(saver.save(2))
    behind = Saver(moving, tmp_path / "behind", trainable=trainable, held=held, asynchronous=True)
    behind.checkpoints.work.stepper = saver.stepper
    writers = Held(monkeypatch)

    async def overlapped() -> None:
        await behind.checkpoints.begin(state(2))
        saver.train(2)
        torch.rand(4)
        await behind.checkpoints.check()
        assert behind.saved == []
        writers.go.set()
        await behind.checkpoints.done()

    asyncio.run(overlapped())
    assert "reference.safetensors" in want
    assert content(behind.checkpoints.folder / "000002") == want
    assert content(saver.save(3)) != want, "training has gone on"


def test_one_checkpoint_at_a_time_is_written_and_each_is_told_of_by_its_name(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, writers = Saver(policy, tmp_path, asynchronous=True), Held(monkeypatch)
    folder, heard = saver.checkpoints.folder, list[tuple[int, list[int], list[int]]]()

    async def overlapped() -> None:
        async def hear(step: int) -> None:
            heard.append((step, list(checkpoints_in(folder)), list(saver.saved)))

        await saver.checkpoints.begin(state(1), lambda: hear(1))
        second = asyncio.ensure_future(saver.checkpoints.begin(state(2), lambda: hear(2)))
        assert await asyncio.to_thread(writers.begun.wait, 30)
        await asyncio.sleep(0.01)
        assert [path.name for path in folder.iterdir()] == [".000001.tmp"]
        assert not second.done()
        writers.go.set()
        await second
        assert heard[0] == (1, [1], [1])
        await saver.checkpoints.done()

    asyncio.run(overlapped())
    assert heard[1] == (2, [1, 2], [1, 2])


def test_what_is_there_while_one_is_written_is_the_older_one(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it then; a run goes on from the older one as if nothing had been begun."""
    saver = Saver(policy, tmp_path / "run", asynchronous=True, keep=1)
    saver.train(1)
    saver.save(1)
    before = saver.tensors()
    writers = Held(monkeypatch)

    async def killed() -> None:
        saver.train(2)
        await saver.checkpoints.begin(state(2))
        assert await asyncio.to_thread(writers.begun.wait, 30)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        writers.go.set()
        await saver.checkpoints.done()

    asyncio.run(killed())
    assert list(checkpoints_in(saver.checkpoints.folder)) == [2]
    other = Saver(policy, tmp_path / "killed")
    assert dataclasses.replace(other.restore(), rng=()) == state(1)
    after = other.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in other.checkpoints.folder.iterdir()] == ["000001"]


def test_a_full_disk_ends_a_run_that_goes_on_meanwhile(policy: Policy, tmp_path: Path) -> None:
    """At its next step; the checkpoint that follows is not begun, and an error that ends it first is the one told."""
    saver = Saver(policy, tmp_path, asynchronous=True)
    before = content(saver.save(1))

    async def overlapped() -> None:
        with small_files(1000):
            await saver.checkpoints.begin(state(2))
            while not (writing := saver.checkpoints._writing).done():  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
        assert writing is not None
        await saver.checkpoints.end(ValueError, ValueError("another"), None)
        with small_files(1000):
            await saver.checkpoints.begin(state(2))
            await asyncio.wait([saver.checkpoints._writing])  # type: ignore[list-item]
        await saver.checkpoints.check()

    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        asyncio.run(overlapped())
    old_one_is_untouched(saver, before, caught.value)


def test_a_run_folder_that_is_gone_is_not_made_anew_by_a_writer(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, writers = Saver(policy, tmp_path / "run", asynchronous=True), Held(monkeypatch)

    async def gone() -> None:
        await saver.checkpoints.begin(state(1))
        shutil.rmtree(tmp_path / "run")
        writers.go.set()
        await saver.checkpoints.done()

    with pytest.raises(CheckpointError):
        asyncio.run(gone())
    assert not (tmp_path / "run").exists()


# Failures while reading


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 200)


def other_json(path: Path) -> None:
    path.write_text('{"step": 1}')


def other_group(path: Path) -> None:
    data = json.loads(path.read_text())
    data["cursor"]["ready"][0][1]["rollouts"] = "none"
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("file", ["state.json", "optimizer.safetensors", "model/model.safetensors"])
@pytest.mark.parametrize("damage", [cut, garbage, Path.unlink])
def test_what_cannot_be_read_is_named(
    policy: Policy, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    saver = Saver(policy, tmp_path)
    path = saver.save(1)
    damage(path / file)
    with pytest.raises(CheckpointError) as caught:
        saver.restore()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", [other_json, other_group])
def test_state_of_another_shape_is_named(policy: Policy, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saver = Saver(policy, tmp_path)
    path = saver.save(1)
    damage(path / "state.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        saver.restore()


def test_a_checkpoint_that_bears_another_steps_name_is_refused(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    saver.save(4).rename(tmp_path / "checkpoints" / "000006")
    with pytest.raises(CheckpointError, match="000006 holds the state of step 4"):
        saver.restore()


@pytest.mark.parametrize("name", ["²", "٤", "7", "0000007"])
def test_a_folder_whose_name_is_no_step_is_no_checkpoint(policy: Policy, tmp_path: Path, name: str) -> None:
    saver = Saver(policy, tmp_path, keep=1)
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    saver.save(1)
    saver.save(2)
    assert saver.restore().step == 2


def test_optimizer_of_other_parameters_is_refused(policy: Policy, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saver = Saver(policy, tmp_path)
    path = saver.save(1)
    save_file({"x": torch.zeros(2)}, path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="other parameters"):
        saver.restore()


def test_another_recipe_is_refused(policy: Policy, tmp_path: Path) -> None:
    saver = Saver(policy, tmp_path)
    saver.save(1)
    before = saver.tensors()
    with pytest.raises(CheckpointError, match="other settings") as caught:
        saver.restore(digest="another")
    assert str(tmp_path / "config.yaml") in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in saver.tensors().items())
