"""``python -m tandem`` that prints, as JSON, which modules of Tandem it has imported at its end."""

from __future__ import annotations

import json
import sys

from tandem.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.write("\n" + json.dumps(sorted(name for name in sys.modules if name.startswith("tandem"))) + "\n")
