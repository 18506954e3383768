"""Parts of Hugging Face tensors in the memory of an engine's worker, attached by what the worker exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.lazy import Tensor
from tandem.transport import sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedPart:
    """A part of a tensor that an engine's worker holds, as a view into the worker's memory."""

    first: tuple[int, int]
    """Row and column that the view's first element has in the whole tensor."""
    tensor: Tensor


def attach_parts(
    exported: Mapping[str, Any], places: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[AttachedPart]]:
    """Every part that a worker holds, by Hugging Face name.

    Args:
        exported: the worker's parameters, as ``sharing.attach`` takes them.
        places: by Hugging Face name, where its parts lie in these: the JSON of the worker's parameter map.

    Raises:
        TransportError: the memory cannot be reached.
    """
    parameters = sharing.attach(exported)
    attached: dict[str, list[AttachedPart]] = {}
    for name, parts in places.items():
        for place in parts:
            parameter = parameters[place["vllm_name"]]
            first = parameter.storage_offset() + place["offset"]
            row, column = place.get("first", (0, 0))
            view = parameter.as_strided(place["size"], place["stride"], first)
            attached.setdefault(name, []).append(AttachedPart(first=(row, column), tensor=view))
    return attached
