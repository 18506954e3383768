"""The command line: ``app`` declares the verbs, and each verb is a file."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Entry point of the ``tandem`` command."""
    # Read as torch loads. Where ranks lose one another its warnings are pages of C++ around the error that says who.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch and transformers are half a million objects, which Python would look through twice more as it ends: that
    # takes seconds, and the process takes all of them with it anyway.
    atexit.register(gc.freeze)
    try:
        from tandem.cli.app import main as run_command  # not before: what imports one verb needs no other
    except KeyboardInterrupt:  # while Python still reads the files
        sys.exit(130)
    run_command()
