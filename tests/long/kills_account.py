"""What a run trained, read from its folder, and held against what it should have trained.

*Trained* is what the final policy's history holds. Steps after the checkpoint that a resume goes on from left no trace
in the weights, and a resume removes their records; so the records that are there at the end are the history, and each
checkpoint's ``tokens_seen``, which travels with the weights, must be the tokens that they add up to.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tandem.envs.arithmetic import Arithmetic

GAP = 1e-3
"""Most by which a logprob may differ between the engine and the trainer on the same weights."""


@dataclass(frozen=True)
class Account:
    """What became of groups."""

    trained: Counter[str]
    """By group, the steps that trained it."""
    lost: frozenset[str]
    """Groups that are nowhere."""
    wrong: tuple[str, ...] = ()
    """What else is not as it should be."""

    @property
    def doubled(self) -> int:
        """Groups that were trained more than once."""
        return sum(times > 1 for times in self.trained.values())

    @property
    def fine(self) -> bool:
        """True if everything was trained exactly once."""
        return not (self.lost or self.doubled or self.wrong)


@dataclass(frozen=True)
class Expected:
    """What is known of a run beforehand."""

    steps: int
    groups: int
    """In a step."""
    size: int
    """Answers in a group."""
    lag: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the environment."""
    seed: int = 0


def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file; one that a kill cut off is none."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Every rollout that was trained, in order."""
    return [row for path in sorted((folder / "rollouts").glob("*.jsonl")) for row in lines(path)]


def steps(folder: Path) -> int:
    """Steps that a run has written down."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max((int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def state(folder: Path) -> dict[str, Any]:
    """Of the newest checkpoint."""
    checkpoint: dict[str, Any] = json.loads((folder / f"checkpoints/{saved(folder):06d}/state.json").read_text())
    return checkpoint


def resumes(folder: Path) -> int:
    """How often the run was gone on with."""
    return sum(event["event"] == "resumed" for event in lines(folder / "events.jsonl"))


def dropped(folder: Path, kept: Mapping[int, set[str]]) -> set[str]:
    """Groups that the final history left out: those told of before the checkpoint that each resume went on from.

    ``kept`` has by that checkpoint's step what its cursor still had to play or train: it may have been dropped while
    the checkpoint was written, and then that is undone.
    """
    gone: set[str] = set()
    at_checkpoint: dict[int, set[str]] = {0: set()}
    for event in lines(folder / "events.jsonl"):
        if event["event"] == "group_dropped":
            gone.add(event["group"])
        elif event["event"] == "checkpoint_saved":
            at_checkpoint[event["step"]] = set(gone)
        elif event["event"] == "resumed":
            gone = at_checkpoint.get(event["step"], gone) - kept.get(event["step"], set())
    return gone


def remember(folder: Path) -> None:
    """Keep a copy of what the run is about to go on from: later checkpoints push it out."""
    kept, step = _kept(folder), saved(folder)
    kept.mkdir(exist_ok=True)
    shutil.copy(folder / f"checkpoints/{step:06d}/state.json", kept / f"{step}.json")


def _remembered(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text())["cursor"] for path in _kept(folder).glob("*.json")}


def _kept(folder: Path) -> Path:
    """Beside all runs: the disk that the run is on may be full."""
    return folder.parents[1] / "gone-on-from"


def played(folder: Path, expected: Expected) -> Account:
    """Of a run that plays its own tasks: every task it drew was trained, dropped or waits, and only one of these."""
    rows, cursor = rollouts(folder), state(folder)["cursor"]
    trained = _trained(rows)
    order = drawn(expected, max(cursor["drawn"].values(), default=0))
    waiting = still(cursor, order)
    out = dropped(folder, {step: still(at, order) for step, at in _remembered(folder).items()}) - waiting
    lost = frozenset(set(order) - set(trained) - out - waiting)
    wrong = _wrong(folder, rows, expected)
    if both := set(trained) & (out | waiting):
        wrong.append(f"{len(both)} groups were trained and also dropped or kept, first {min(both)}")
    if unknown := set(trained) - set(order):
        wrong.append(f"{len(unknown)} groups were trained that were never drawn, first {min(unknown)}")
    return Account(trained, lost, tuple(wrong))


def still(cursor: Mapping[str, Any], order: list[str]) -> set[str]:
    """What a cursor has still to play or to train. A run that was gone on from it may have drawn less in the end."""
    numbers = [draw[1] for draw in (*(draw for draw, _ in cursor["ready"]), *cursor["again"])]
    return {order[number] for number in numbers if number < len(order)}


def foreign(folder: Path, expected: Expected, ledger: Path) -> Account:
    """Of a run on a broker: every group that it accepted was trained, dropped, or is there still."""
    rows, cursor = rollouts(folder), state(folder)["cursor"]
    trained = _trained(rows)
    ids = {name.rpartition("@")[2]: name for name in trained}
    kept = {group["id"].rpartition("@")[2] for _, group in cursor["ready"]}
    out = {name.rpartition("@")[2] for name in dropped(folder, {})} - kept
    accepted, left, unserved = _witnessed(ledger)
    stale = set(unserved) - set(ids) - out
    lost = frozenset(accepted - set(ids) - out - kept - left - stale)
    wrong = _wrong(folder, rows, expected)
    if young := [id for id in stale if unserved[id] <= expected.lag]:
        wrong.append(f"the broker dropped {len(young)} groups that were not too old, first {min(young)}")
    if strange := set(ids) - accepted:
        wrong.append(f"{len(strange)} groups were trained that the broker never accepted, first {min(strange)}")
    if both := set(ids) & (out | kept | left | stale):
        wrong.append(f"{len(both)} groups were trained and are also dropped, kept or queued, first {min(both)}")
    return Account(trained, lost, tuple(wrong))


def equals(folder: Path, reference: Path, *, bits: bool = True) -> list[str]:
    """How a run differs from one that nobody interrupted: what was trained, token by token, and the weights.

    Args:
        folder: the run's.
        reference: the uninterrupted one's.
        bits: compare the weights too; a real vLLM's logprobs differ in their last bits with what else is sampled.
    """
    differs = []
    mine, theirs = (Counter(map(_identity, rollouts(f))) for f in (folder, reference))
    if mine != theirs:
        differs.append(
            f"{(mine - theirs).total()} rollouts were trained that the uninterrupted run did not train, and "
            f"{(theirs - mine).total()} not that it did"
        )
    last = f"checkpoints/{saved(reference):06d}"
    for file in (reference / last).rglob("*.safetensors") if bits else ():
        name = file.relative_to(reference)
        tensors, others = load_file(folder / name), load_file(file)  # their headers are in any order
        if tensors.keys() != others.keys() or not all(tensors[key].equal(each) for key, each in others.items()):
            differs.append(f"{name} differs from the uninterrupted run's")
    return differs


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Prompt and sample, the step that trained it, and every token."""
    return row["step"], row["group"], row["rollout"], tuple(token["id"] for token in row["tokens"])


def _trained(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(group for _, group in {(row["step"], row["group"]) for row in rows})


def _wrong(folder: Path, rows: list[dict[str, Any]], expected: Expected) -> list[str]:
    """What must hold of every run."""
    wrong = []
    numbers = [row["step"] for row in lines(folder / "metrics.jsonl")]
    if numbers != list(range(1, expected.steps + 1)):
        wrong.append(f"metrics.jsonl has not each of {expected.steps} steps once: {numbers}")
    by_step = Counter(row["step"] for row in rows)
    each = expected.groups * expected.size
    if odd := {step: count for step in range(1, expected.steps + 1) if (count := by_step[step]) != each}:
        wrong.append(f"steps have {odd} rollouts and not {each}")
    if twice := sum(n > 1 for n in Counter(row["rollout"] for row in rows).values()):
        wrong.append(f"{twice} rollouts were trained more than once")
    tokens = sum(token["m"] for row in rows for token in row["tokens"])
    if (seen := state(folder)["tokens_seen"]) != tokens:
        wrong.append(f"the last checkpoint was trained on {seen} tokens and the records have {tokens}")
    for row in rows:
        first, last = row["versions"]
        if not (0 <= row["step"] - 1 - first <= expected.lag and last < row["step"]):
            wrong.append(f"{row['rollout']} was sampled by versions {first} to {last} and trained in {row['step']}")
        if not math.isfinite(row["reward"]):
            wrong.append(f"{row['rollout']} has reward {row['reward']}")
        if first == last == row["step"] - 1 and any(abs(t["lp"] - t["tp"]) > GAP for t in row["tokens"] if t["m"]):
            wrong.append(f"{row['rollout']} was not sampled from the weights of version {first}")
    published = [event for event in lines(folder / "events.jsonl") if event["event"] == "published"]
    unproven = [event["step"] for event in published if event["probe_gap"] is None]
    if unproven:
        wrong.append(f"the weights of steps {unproven} were published without proof")
    return wrong


def drawn(expected: Expected, count: int) -> list[str]:
    """Group ids by draw, from the recipe alone."""
    tasks = Arithmetic(**expected.options).tasks("train")
    names: list[str] = []
    while len(names) < count:
        epoch, order = len(names) // len(tasks), list(range(len(tasks)))
        random.Random(f"{expected.seed}/{epoch}").shuffle(order)
        names += [f"{tasks[place].id}@{epoch}" for place in order]
    return names[:count]


# --- the broker's ledger as a witness of its own ---

TRIGGERS = """
CREATE TABLE IF NOT EXISTS witness (id TEXT, what TEXT, version INTEGER, policy INTEGER);
CREATE TRIGGER IF NOT EXISTS accepted AFTER INSERT ON entries BEGIN
    INSERT INTO witness VALUES (NEW.id, 'accepted', NEW.version, NULL);
END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON entries BEGIN
    INSERT INTO witness VALUES (OLD.id, OLD.state, OLD.version, NULL);
END;
CREATE TRIGGER IF NOT EXISTS known AFTER INSERT ON facts WHEN NEW.name = 'progress' BEGIN
    UPDATE witness SET policy = json_extract(NEW.value, '$.policy') WHERE policy IS NULL AND what != 'accepted';
END;
"""
"""Written in the transactions of the broker itself, so that a kill leaves both or neither. Its progress, and in it the
policy, is the last that a transaction writes."""


def watch(ledger: Path) -> None:
    """Have a ledger write down every group that comes and goes."""
    database = sqlite3.connect(ledger / "ledger.sqlite", timeout=30)
    try:
        database.executescript(TRIGGERS)
    finally:
        database.close()


def _witnessed(ledger: Path) -> tuple[set[str], set[str], dict[str, int]]:
    """Groups accepted, groups still there, and those that left the queue without being served, with their age."""
    database = sqlite3.connect(ledger / "ledger.sqlite", timeout=30)
    try:
        rows = database.execute("SELECT id, what, version, policy FROM witness").fetchall()
        left = {id for (id,) in database.execute("SELECT id FROM entries")}
    finally:
        database.close()
    accepted = {id for id, what, *_ in rows if what == "accepted"}
    unserved = {id: (policy or 0) - (version or 0) for id, what, version, policy in rows if what == "queued"}
    return accepted, left, unserved
