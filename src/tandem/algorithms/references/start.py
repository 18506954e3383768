"""Initial-policy reference: the model as it was loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.references.base import Reference


@dataclass(frozen=True, kw_only=True)
class Start(Reference):
    """The model as it was loaded: with ``trainable: full`` a second copy, with an adapter the adapter switched off.

    An adapter starts at zero, so a copy of its first tensors switches it off. Nothing is saved: a resumed run loads the
    same model again before its checkpoint.
    """
