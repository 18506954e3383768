"""What optimizers make for the time of an update, and forget."""

from __future__ import annotations

from tandem.config import registry as resolve
from tandem.optimizers.base import LARGE_PIECE, Optimizer

_PIECE = 1 << 22
"""Numbers of a weight that are widened at once."""
_BYTES = {"adamw": 0, "adamw8bit": 17, "adafactor": 0, "adamw_cpu": 0}
"""Of each number that is updated at once, where weights are float32 or have a float32 master."""
_WIDENED = {
    "adamw": {"kahan": 18, "stochastic": 12},
    "adamw8bit": {"kahan": 21, "stochastic": 21},
    "adafactor": {"kahan": 18, "stochastic": 12},
}
"""The same by what keeps narrow weights precise."""


def update_bytes(optimizer: Optimizer, largest: int, width: int, *, is_host: bool = True) -> int:
    """Bytes at the peak of an update, beside what the optimizer keeps; 0 for a kind that is not Tandem's own.

    Args:
        optimizer: the recipe's.
        largest: numbers in the largest trained tensor.
        width: bytes of one of them.
        is_host: weights are in the host's memory.
    """
    kind = resolve.kind_of("optimizers", optimizer)
    precision = getattr(optimizer, "precision", "masters") if width < 4 else "masters"
    each = _WIDENED.get(kind, {}).get(precision, _BYTES.get(kind, 0))
    gradient = 4 if width < 4 and getattr(optimizer, "gradients", "float32") == "bfloat16" else 0  # widened to be read
    piece = min(largest, _PIECE if is_host or kind != "adamw8bit" else LARGE_PIECE)
    if kind == "adafactor":  # its means need all of a tensor; only what narrows it again goes by pieces
        own = 0 if precision == "masters" else 4 * largest + (each - 4) * piece
        return own + gradient * largest
    return piece * (each + gradient)
