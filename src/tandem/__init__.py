"""Tandem: GRPO post-training in which trainer and inference engine ride one copy of the weights."""

from __future__ import annotations

__version__ = "0.1.0"
