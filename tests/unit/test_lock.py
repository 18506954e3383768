"""A run's folder has one trainer at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.trainer.run_folder import RunLock


def test_a_folder_is_locked_for_one_trainer_until_it_lets_go(tmp_path: Path) -> None:
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path)
        first.take(tmp_path)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} on .* is at work"):
            second.take(tmp_path)
    with RunLock() as third:
        third.take(tmp_path)
        third.check()
