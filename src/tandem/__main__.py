"""``python -m tandem``."""

from __future__ import annotations

from tandem.cli import main

if __name__ == "__main__":
    main()
