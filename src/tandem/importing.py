"""Imports of the user's own modules, which may do anything: raise, end the process, or never come back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tandem.errors import message_of

SECONDS = 120.0
"""How long an import may take."""


class _Late(BaseException):
    """The import takes too long. No Exception: a module that catches those must not catch this."""


@contextmanager
def importing() -> Iterator[None]:
    """Let an import in this block fail with an Exception whatever the module does; only the main thread has a deadline.

    Raises:
        ImportError: the module called ``sys.exit`` or ``os._exit``, raised another BaseException, or took too long.
    """
    process, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that the module forked
            leave(status)
        raise SystemExit(f"os._exit({status})")

    def ring(*_: Any) -> NoReturn:
        raise _Late(f"longer than {SECONDS:g} s")

    is_timed = threading.current_thread() is threading.main_thread()
    if is_timed:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)  # again and again: a destructor may swallow one
    os._exit = refuse
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except _Late as error:
        raise ImportError(f"it took {error}").with_traceback(error.__traceback__) from None
    except BaseException as error:
        raise ImportError(f"it raised {message_of(error)}").with_traceback(error.__traceback__) from None
    finally:
        os._exit = leave
        if is_timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
