"""The command line: ``app`` declares the verbs, and each verb is a file."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``tandem`` command."""
    from tandem.cli.app import main as run_command  # not before: whoever imports one verb needs no other

    run_command()
