"""run.log holds what is worth keeping; the terminal hears of warnings."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from tandem.observability.log import to_folder


def test_own_records_from_info_and_others_from_warning_reach_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with to_folder(tmp_path) as file:
        logging.getLogger("tandem.trainer").info("step %d", 3)
        logging.getLogger("tandem.trainer").debug("unseen")
        logging.getLogger("elsewhere").info("unseen too")
        logging.getLogger("elsewhere").warning("look here")
    assert file == tmp_path / "logs" / "run.log"
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert "INFO    tandem.trainer: step 3" in lines[0]
    assert "WARNING elsewhere: look here" in lines[1]
    assert capsys.readouterr().err == "WARNING: look here\n"


def test_tracebacks_go_to_the_file_and_not_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with to_folder(tmp_path) as file:
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("tandem").warning("a logger failed", exc_info=True)
    assert "Traceback" in file.read_text()
    assert capsys.readouterr().err == "WARNING: a logger failed\n"


def test_python_warnings_are_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with to_folder(tmp_path) as file:
            warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    assert "DeprecationWarning: old thing" in file.read_text()
    assert "old thing" in capsys.readouterr().err


def test_everything_is_put_back_and_a_resumed_run_appends(tmp_path: Path) -> None:
    root, own, show = logging.getLogger(), logging.getLogger("tandem"), warnings.showwarning
    before = (list(root.handlers), own.level)
    for text in ("first", "second"):
        with to_folder(tmp_path):
            own.info(text)
    with pytest.raises(KeyError), to_folder(tmp_path):
        raise KeyError
    assert (list(root.handlers), own.level) == before
    assert warnings.showwarning is show
    own.info("third")
    text = (tmp_path / "logs" / "run.log").read_text()
    assert "first" in text
    assert "second" in text
    assert "third" not in text


def test_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full takes what is opened and refuses what is written."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.log").symlink_to("/dev/full")
    with to_folder(tmp_path):
        logging.getLogger("tandem.trainer").info("lost")
        logging.getLogger("tandem.trainer").info("lost too")
    stderr = capsys.readouterr().err
    assert stderr.count("run.log cannot be written") == 1
    assert "No space left on device" in stderr
    assert "Traceback" not in stderr
