"""A ledger that somebody damaged: what was accepted is served, or the broker says in a line that it cannot be."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.brokers import RUN, group, served

from tandem.errors import BrokerError
from tandem_broker.journal import Ledger
from tandem_broker.queue.records import StoreOptions

CODE = """
import json, os, sys
from pathlib import Path
from tandem_broker.journal import Ledger
from tandem_broker.protocol.messages import RunParameters
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import StoreOptions
ledger = Ledger.open(Path(sys.argv[1]), StoreOptions(), 0.0)
ledger.store.register(RunParameters(**json.loads(sys.argv[2])))
ledger.store.take(0.0)
for name in range(40):
    ledger.store.put(GroupEntry(id=str(name), env=None, size=1, payload=b"%d " % name * 100), 0.0)
    ledger.commit()
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
    """What the broker says instead of starting; the folder is free again."""
    for _ in range(2):
        with pytest.raises(BrokerError) as error:
            Ledger.open(folder, StoreOptions(), 0.0)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


NONSENSE = {
    "a state": "UPDATE entries SET state = 'lost' WHERE place = 3",
    "a size": "UPDATE entries SET size = 'x' WHERE place = 3",
    "a payload": "UPDATE payloads SET data = x'00' WHERE place = 3",
    "a group without its payload": "DELETE FROM payloads WHERE place = 3",
    "a fact that is no JSON": "UPDATE facts SET value = '{' WHERE name = 'progress'",
    "a fact of another kind": "UPDATE facts SET value = '[1]' WHERE name = 'progress'",
    "a fact without its keys": "UPDATE facts SET value = '{\"a\": 1}' WHERE name = 'progress'",
}


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_rows_that_make_no_sense(tmp_path: Path, nonsense: str) -> None:
    killed(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute(nonsense)
    database.close()
    assert "damaged" in refused(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["text", "hole"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    killed(tmp_path)
    Ledger.open(tmp_path, StoreOptions(), 0.0).close()
    path = tmp_path / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(b"hello " * 1000 if damage == "text" else content)
    assert "damaged" in refused(tmp_path)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "the ledger is a folder": (lambda folder: (folder / "ledger.sqlite").mkdir(), "cannot be opened"),
    "the lock is a folder": (lambda folder: (folder / "lock").mkdir(), "no ledger can be kept"),
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


@pytest.mark.parametrize("gone", ["", "ledger.sqlite", "ledger.sqlite-wal"])
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
