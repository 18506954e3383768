"""Imports of the user's own modules, which may end the process, and of libraries that need not be there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.errors import TandemError, message_of


def library(module: str, whose: str, extra: str, kind: type[TandemError]) -> Any:
    """Import a module of an extra; raises an error of this kind, which says what needs it, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise kind(f"{whose} needs {name} ({error}): pip install 'tandem-rl[{extra}]'") from error


@contextmanager
def importing() -> Iterator[None]:
    """Turn a ``sys.exit`` of a module that is imported in this block into an ImportError."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ImportError(f"it raised {message_of(error)}").with_traceback(error.__traceback__) from None
