"""``python -m tandem`` to which a rank is lost after fewer seconds without a sign of life."""

from __future__ import annotations

from tandem.cli import main
from tandem.distributed import channel, children

channel.SILENT_SECONDS = children.SILENT_SECONDS = 6.0

if __name__ == "__main__":
    main()
