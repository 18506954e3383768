"""Imports of the user's own modules, which may end the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import message_of


@contextmanager
def importing() -> Iterator[None]:
    """Turn a ``sys.exit`` of a module that is imported in this block into an ImportError."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ImportError(f"it raised {message_of(error)}").with_traceback(error.__traceback__) from None
