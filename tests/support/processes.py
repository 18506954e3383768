"""Programs that tests start as processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def start(
    words: Sequence[str],
    *,
    cwd: Path,
    out: Path | int,
    environment: Mapping[str, str] = os.environ,
    module: str = "tandem",
    limit: int = 0,
) -> subprocess.Popen[str]:
    """Start ``python -m MODULE WORDS`` as the leader of a session; it is killed if it outlives the tests.

    Args:
        words: the command line.
        cwd: where it runs.
        out: the file to which stdout and stderr are appended, or ``subprocess.PIPE``.
        environment: all of it.
        module: what is run.
        limit: most bytes of a file that it may write; 0: any number.
    """
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, text=True,
            stdout=out if isinstance(out, int) else stack.enter_context(out.open("a")), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    if limit:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    atexit.register(process.kill)
    return process
