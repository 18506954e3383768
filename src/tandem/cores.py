"""Processor cores. Standard library only: what may not import torch may import this."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
