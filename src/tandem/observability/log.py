"""Logging of a run: everything worth keeping goes to logs/run.log, warnings also to the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import redacted
from tandem.printable import printable

FILE_ONLY = {"file_only": True}
"""``extra`` of a record that is for run.log alone, since the terminal is told otherwise."""


@contextmanager
def to_folder(path: Path) -> Iterator[Path]:
    """Log to ``path/logs/run.log`` while the block lasts, and warnings and errors to stderr too.

    Tandem's own records are kept from INFO on, other libraries' from WARNING on. Python warnings are
    logged. Everything is put back as it was at the end.

    Args:
        path: the run folder.

    Yields:
        The log file; it is appended to, so a resumed run continues it.
    """
    file = path / "logs" / "run.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    to_file = _File(file, encoding="utf-8")
    to_file.setFormatter(_Plain("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ"))
    to_terminal = _Terminal(level=logging.WARNING)
    to_terminal.addFilter(lambda record: not getattr(record, "file_only", False))
    root, package = logging.getLogger(), logging.getLogger("tandem")
    before = package.level
    package.setLevel(logging.INFO)
    for handler in (to_file, to_terminal):
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield file
    finally:
        logging.captureWarnings(False)
        package.setLevel(before)
        for handler in (to_file, to_terminal):
            root.removeHandler(handler)
            handler.close()


class _File(logging.FileHandler):
    """Loses lines while the disk is full, and says so once: a log is no reason for a run to end."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._reported:
            self._reported, error = True, sys.exc_info()[1]
            sys.stderr.write(f"ERROR: {self.baseFilename} cannot be written ({error}); lines are missing there\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Terminal(logging.Handler):
    """Writes messages to whatever sys.stderr is at the time, so that a live console can put the line above itself.

    The traceback is in run.log.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(_harmless(f"{record.levelname}: {record.getMessage()}") + "\n")
        except Exception:
            self.handleError(record)


class _Plain(logging.Formatter):
    """Messages and errors may quote what a stranger sent: lines stay lines and everything else is harmless."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return _harmless(super().format(record))


def _harmless(text: str) -> str:
    return "\n".join(map(printable, redacted(text).replace("\t", " ").split("\n")))
