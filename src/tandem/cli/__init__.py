"""The command line: ``app`` declares the verbs, and each verb is a file."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``tandem`` command."""
    try:
        from tandem.cli.app import main as run_command  # not before: what imports one verb needs no other
    except KeyboardInterrupt:  # while Python still reads the files
        sys.exit(130)
    run_command()
