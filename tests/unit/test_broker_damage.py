"""A ledger that somebody damaged: what was accepted is served, or the broker says in a line that it cannot be."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from brokers import RUN, group, served

from tandem.broker.journal.ledger import Ledger
from tandem.broker.journal.payloads import HEAD, MAGIC, Payloads
from tandem.broker.queue.records import StoreOptions
from tandem.errors import BrokerError

CODE = """
import json, os, sys
from pathlib import Path
from tandem.broker.journal.ledger import Ledger
from tandem.broker.protocol.messages import RunParameters
from tandem.broker.queue.records import GroupEntry, StoreOptions
ledger = Ledger.open(Path(sys.argv[1]), StoreOptions(), 0.0)
ledger.store.register(RunParameters(**json.loads(sys.argv[2])))
ledger.store.take(0.0)
for name in range(40):
    ledger.store.put(GroupEntry(id=str(name), env=None, size=1, payload=b"%d " % name * 100), 0.0)
    ledger.settled().result(60)
os._exit(9)
"""


def killed(folder: Path) -> None:
    """A broker accepts 40 groups one after the other and is killed: its write-ahead log is there."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), json.dumps({**RUN, "batch_size": 2})], timeout=300, check=False
    )
    assert done.returncode == 9
    assert (folder / "ledger.sqlite-wal").stat().st_size > 50_000


def refused(folder: Path) -> str:
    """What the broker says instead of starting; the folder is free again, and no payload is gone."""
    before = payloads(folder)
    for _ in range(2):
        with pytest.raises(BrokerError) as error:
            Ledger.open(folder, StoreOptions(), 0.0)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert before.items() <= payloads(folder).items()
    return str(error.value)


def payloads(folder: Path) -> dict[str, bytes]:
    """Files that have something in them."""
    files = folder.glob("payloads/*.bin")
    return {path.name: path.read_bytes() for path in files if path.is_file() and path.stat().st_size}


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


LOSSES: dict[str, Callable[[Path], object]] = {
    "the log is gone": lambda folder: (folder / "ledger.sqlite-wal").unlink(),
    "half of the log is gone": lambda folder: (folder / "ledger.sqlite-wal").write_bytes(
        (folder / "ledger.sqlite-wal").read_bytes()[: (folder / "ledger.sqlite-wal").stat().st_size // 2]
    ),
    "a bit of the log": lambda folder: flipped(folder / "ledger.sqlite-wal", 40_000),
    "the database is empty": lambda folder: [
        (folder / name).write_bytes(b"") for name in ("ledger.sqlite", "ledger.sqlite-wal")
    ],
    "the database is gone": lambda folder: [path.unlink() for path in folder.glob("ledger.sqlite*")],
}


@pytest.mark.slow
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_what_the_payloads_know_and_the_ledger_does_not(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    killed(tmp_path)
    shutil.copytree(tmp_path, copy := tmp_path / "copy")
    lose(copy)
    assert "damaged" in refused(copy)
    assert payloads(copy), "and are still there"
    ledger = Ledger.open(tmp_path, StoreOptions(), 0.0)
    assert ledger.store.queued_groups == 40, "a kill alone costs nothing"
    ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("table", ["entries", "facts"])
def test_rows_that_are_gone(tmp_path: Path, table: str) -> None:
    killed(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute(f"DELETE FROM {table}")
    database.close()
    assert "damaged" in refused(tmp_path)


NONSENSE = {
    "a state": "UPDATE entries SET state = 'lost' WHERE place = 3",
    "a size": "UPDATE entries SET size = 'x' WHERE place = 3",
    "a fact that is no JSON": "UPDATE facts SET value = '{' WHERE name = 'run'",
    "a fact of another kind": "UPDATE facts SET value = '[1]' WHERE name = 'run'",
    "a fact without its keys": "UPDATE facts SET value = '{\"a\": 1}' WHERE name = 'run'",
}


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_rows_that_make_no_sense(tmp_path: Path, nonsense: str) -> None:
    killed(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute(nonsense)
    database.close()
    assert "damaged" in refused(tmp_path)


def test_a_bit_of_a_recent_group_does_not_keep_the_broker_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path)
    for path in tmp_path.glob("payloads/*.bin"):
        if path.stat().st_size:
            flipped(path, path.read_bytes().index(b"39 39 "))

    async def scene() -> None:
        ledger = Ledger.open(tmp_path, StoreOptions(), 0.0)
        async with served(ledger=ledger) as client:
            assert (await client.get("/latest_example")).status == 200
            assert (await client.get("/status")).json["queue_size"] == 40
        ledger.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scene())
    assert "is damaged or missing at byte" in caplog.text


def test_a_payload_cannot_pass_for_a_head(tmp_path: Path) -> None:
    """Else one could keep the broker from starting."""
    one = Payloads(tmp_path)
    forged = HEAD.pack(MAGIC, b"guessed!", 999, 0)
    list(one.append([bytes(4096 - HEAD.size) + forged + bytes(4064) + forged], 7))
    one.close()
    two = Payloads(tmp_path)
    assert two.newest_mark() == 7
    two.close()


def test_a_folder_of_a_tandem_that_wrote_no_marks_is_taken(tmp_path: Path) -> None:
    killed(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("DELETE FROM facts WHERE name = 'written'")
    database.close()
    for path in tmp_path.glob("payloads/*.bin"):
        path.write_bytes(path.read_bytes().replace(MAGIC, bytes(len(MAGIC))))
    ledger = Ledger.open(tmp_path, StoreOptions(), 0.0)
    assert ledger.store.queued_groups == 40
    ledger.close()


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "payloads is a file": (lambda folder: (folder / "payloads").write_text(""), "payloads cannot be kept in"),
    "a folder among payloads": (lambda folder: (folder / "payloads/00000001.bin").mkdir(parents=True), "is no file"),
    "the ledger is a folder": (lambda folder: (folder / "ledger.sqlite").mkdir(), "it is no file"),
    "the lock is a folder": (lambda folder: (folder / "lock").mkdir(), "lock cannot be opened"),
    "the log is a folder": (lambda folder: (folder / "ledger.sqlite-wal").mkdir(), "cannot be opened"),
}


@pytest.mark.parametrize(("make", "says"), ODD.values(), ids=ODD)
def test_what_lies_in_the_way_is_told_in_a_line(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    make(tmp_path)
    assert says in refused(tmp_path)


def test_a_file_in_the_way_of_the_folder_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(BrokerError, match="no ledger can be kept in"):
        Ledger.open(tmp_path / "data", StoreOptions(), 0.0)


def test_files_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "payloads").mkdir()
    others = [tmp_path / "payloads" / name for name in ("notes.bin", "²²²²²²²².bin", "README", "7.bin")]
    for path in others:
        path.write_text("mine")
    Ledger.open(tmp_path, StoreOptions(), 0.0).close()
    assert all(path.read_text() == "mine" and str(path) in caplog.text for path in others)


@pytest.mark.parametrize("gone", ["", "payloads", "ledger.sqlite", "ledger.sqlite-wal"])
def test_nothing_is_promised_once_the_folder_is_deleted(tmp_path: Path, gone: str) -> None:
    async def scene() -> None:
        ledger = Ledger.open(tmp_path / "data", StoreOptions(), 0.0)
        async with served(ledger=ledger) as client:
            await client.begin(batch_size=4)
            assert (await client.post("/scored_data", group())).status == 200
            path = tmp_path / "data" / gone
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            for _ in range(2):
                reply = await client.post("/scored_data", group())
                assert reply.status == 503
                assert "deleted" in json.dumps(reply.json)
        ledger.close()

    asyncio.run(scene())
