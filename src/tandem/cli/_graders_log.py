"""The file that takes what rewards print while a recipe is checked."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def graders_log(printed: Callable[[Path], object]) -> Iterator[Path]:
    """Path of the file while the block lasts; what it then holds is handed to ``printed``, and an empty one goes."""
    log = Path(tempfile.mkdtemp(prefix="tandem-check-")) / "graders.log"
    try:
        yield log
    finally:
        if log.exists() and log.stat().st_size:
            printed(log)
        else:
            shutil.rmtree(log.parent)
