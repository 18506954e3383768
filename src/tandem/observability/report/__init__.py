"""A run folder as one self-contained page: ``build(folder)`` writes its report.html."""

from __future__ import annotations

from tandem.observability.report.page import build

__all__ = ["build"]
