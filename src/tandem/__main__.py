"""``python -m tandem``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from tandem.cli.app import main
    except KeyboardInterrupt:  # while Python still reads the files
        sys.exit(130)
    main()
