"""Process that plays a package's environment: requests and answers are lines of JSON on its pipes.

It runs by itself in the interpreter that has the package, and imports nothing of Tandem, which need not be there. What
it is asked for are the methods of what the reader's ``load`` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any


class Server:
    """Answers requests side by side, each by its number."""

    def __init__(self, reader: str, options: Mapping[str, Any], answers: Any) -> None:
        self.reader, self.options, self.answers = reader, options, answers
        self.running: dict[int, asyncio.Task[None]] = {}

    @functools.cached_property
    def played(self) -> Any:
        """Loaded by the first request, to which the error goes if it cannot be."""
        return runpy.run_path(self.reader)["load"](**self.options)

    async def answer(self, number: int, method: str, options: dict[str, Any]) -> None:
        """Do what a request asks for."""
        try:
            value = getattr(self.played, method)(**options)
            answer = {"value": await value if asyncio.iscoroutine(value) else value}
        except asyncio.CancelledError:
            return
        except BaseException as error:  # the boundary to the environment: whatever it raises is its rollout's
            while isinstance(error, BaseExceptionGroup):  # as those who serve tools raise it
                error = error.exceptions[0]
            answer = {"error": f"{type(error).__name__}: {error}{f' ({cause})' if (cause := error.__cause__) else ''}"}
        finally:
            self.running.pop(number, None)
        self.tell(number, answer)

    def tell(self, number: int, answer: dict[str, Any]) -> None:
        """Write an answer."""
        self.answers.write(json.dumps({"number": number, **answer}, default=_plain).encode() + b"\n")
        self.answers.flush()

    def request(self, line: bytes) -> None:
        """Begin what a line asks for; ``cancel`` ends what was begun, and is answered at once."""
        options = json.loads(line)
        number, method = options.pop("number"), options.pop("method")
        if method != "cancel":
            self.running[number] = asyncio.ensure_future(self.answer(number, method, options))
            return
        if (task := self.running.get(options["request"])) is not None:
            task.cancel()
        self.tell(number, {})


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def _read(requests: Any, loop: asyncio.AbstractEventLoop, server: Server) -> None:
    """Pass requests on; when the trainer is gone, end this process and all that it started."""
    for line in requests:
        loop.call_soon_threadsafe(server.request, line)
    for child in _descendants(os.getpid()):  # some, such as servers of tools, have a session of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    parents = {}
    for file in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(file) as stat:
            parents[int(file.split("/")[2])] = int(stat.read().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:  # which grows meanwhile
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


async def main() -> None:
    """Serve until the trainer is gone."""
    # What the environment prints goes to stderr: the pipes move out of its way first.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    server = Server(sys.argv[2], json.loads(sys.argv[3]), answers)
    threading.Thread(target=_read, args=(requests, asyncio.get_running_loop(), server), daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
