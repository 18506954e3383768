"""The two files by which an engine and a trainer that were started apart find each other's weights.

``vllm_bridge_config.json`` says where an engine's parameters lie, ``nccl_bridge_config.json`` what travels through a
broadcast group. Fields, names and search order are those of Atropos' example trainer; what it does not have is under
``tandem``. Fields that this page does not know are ignored.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import TransportError
from tandem.lazy import Tensor
from tandem.transport import sharing
from tandem.transport.checksums import Shard

log = logging.getLogger(__name__)

VLLM_FILE = "vllm_bridge_config.json"
"""Written by the engine."""
NCCL_FILE = "nccl_bridge_config.json"
"""Written by the trainer, beside its checkpoints."""
LAST_RESORT = Path("/tmp/atropos_bridge")
"""Looked into when the engine's file is nowhere else."""


class MappedParameter(msgspec.Struct, kw_only=True, frozen=True):
    """One parameter of the engine."""

    vllm_name: str
    """The engine's name of it."""
    shape: list[int]
    dtype: str
    """Such as ``torch.bfloat16``."""
    device: str
    """Such as ``cuda:0``."""


class VllmBridge(msgspec.Struct, kw_only=True, frozen=True):
    """Contents of ``vllm_bridge_config.json``: the engine's parameters and where they are mapped."""

    model: str
    """Path or name of the model that the engine loaded."""
    tp_degree: int
    """Tensor-parallel ranks of the engine."""
    dp_shard_degree: int
    """Ranks over which each parameter is sharded for data parallelism."""
    param_names: list[str]
    param_mappings: dict[str, MappedParameter]
    """The parameters by name."""
    ipc_handles: dict[str, dict[str, Any]]
    """Where each parameter's memory is: ``tensors`` of what ``sharing`` describes."""
    shared_weights_enabled: bool
    """The engine samples from the memory that it describes here."""
    single_copy_enabled: bool
    """That memory can be attached."""
    num_params: int
    """Number of parameters."""
    tandem: dict[str, Any] = {}
    """``lent``: the rest of the description, which tells files on the host from CUDA handles; ``places``: where each
    Hugging Face tensor lies in a parameter; ``url``: the engine's."""

    @classmethod
    def of_places(cls, model: str, exported: Mapping[str, Any], places: Mapping[str, Any], **tandem: Any) -> VllmBridge:
        """The file of an engine of one process.

        Args:
            model: path or name of what the engine loaded.
            exported: the memory, as ``sharing.attach`` takes it.
            places: where each Hugging Face tensor lies in it.
            tandem: other entries of ``tandem``.
        """
        device = next(iter(places.values()))[0]["device"]
        handles = {name: dict(entry) for name, entry in exported["tensors"].items()}
        params = {
            name: MappedParameter(vllm_name=name, shape=list(entry["shape"]), dtype=str(entry["dtype"]), device=device)
            for name, entry in handles.items()
        }
        kind = {key: value for key, value in exported.items() if key != "tensors"}
        return cls(
            model=model,
            tp_degree=1,
            dp_shard_degree=1,
            param_names=sorted(params),
            param_mappings=params,
            ipc_handles=handles,
            shared_weights_enabled=True,
            single_copy_enabled=bool(handles),
            num_params=len(params),
            tandem={"places": dict(places), **tandem, "lent": kind},
        )

    def attach(self) -> dict[str, Tensor]:
        """Every weight by its Hugging Face name, as a view into the engine's memory.

        Raises:
            TransportError: the memory cannot be reached, or the file does not say where these weights lie in it.
        """
        places, memory = self.tandem.get("places"), self.tandem.get("lent")
        if not self.ipc_handles or not isinstance(places, dict) or not isinstance(memory, dict) or self.tp_degree != 1:
            raise TransportError(
                f"the {VLLM_FILE} of {self.model!r} does not say where Hugging Face's tensors lie in the engine's; let "
                "an engine of one process that shares its weights write it: tandem serve engine RECIPE"
            )
        exported = {**memory, "tensors": self.ipc_handles}
        return {name: part.tensor for name, (part,) in attach_parts(exported, places).items()}

    def write(self, path: Path) -> Path:
        """Write the file, at ``path`` or in the folder ``path``, complete or not at all; returns where it is."""
        return write_json(_file(path), msgspec.to_builtins(self))

    @classmethod
    def read(cls, path: Path) -> VllmBridge:
        """Read the file, at ``path`` or in the folder ``path``.

        Raises:
            TransportError: it is missing, another user's, torn or incomplete.
        """
        path = _file(path)
        try:
            with path.open("rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                text = file.read()
        except OSError as error:
            raise TransportError(f"{path} cannot be read ({error.strerror}); is the engine running?") from error
        if owner not in (0, os.geteuid()):  # it names memory to be written to, and may lie where everybody can write
            raise TransportError(f"{path} belongs to user {owner}; give the path of a file of your own engine")
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"{path} is not as expected: {error}; let the engine write it again") from error


def attach_parts(
    exported: Mapping[str, Any], places: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[Shard]]:
    """Every part of a tensor that an engine's worker holds, as views into its memory, by Hugging Face name.

    Args:
        exported: the worker's parameters, as ``sharing.attach`` takes them.
        places: by Hugging Face name, where its parts lie in these: the JSON of the worker's parameter map.

    Raises:
        TransportError: the memory cannot be reached.
    """
    parameters = sharing.attach(exported)
    attached: dict[str, list[Shard]] = {}
    for name, parts in places.items():
        for place in parts:
            parameter = parameters[place["vllm_name"]]
            view = parameter.as_strided(place["size"], place["stride"], parameter.storage_offset() + place["offset"])
            row, column = place.get("first", (0, 0))
            attached.setdefault(name, []).append(Shard(name, view, (row, column)))
    return attached


def find(path: Path | None = None) -> Path:
    """The engine's file: at ``path``, in ``$LOGDIR``, in the working directory, or in ``LAST_RESORT``, in this order.

    A path that was given but is not there is reported when the file is found elsewhere.

    Raises:
        TransportError: it is in none of these places.
    """
    folders = [Path(os.environ["LOGDIR"])] if os.environ.get("LOGDIR") else []
    files = [_file(place) for place in (*([path] if path else []), *folders, Path.cwd(), LAST_RESORT)]
    for file in files:
        if file.is_file():
            if path and file is not files[0]:
                log.warning("%s does not exist; the engine's weights are found by %s instead", files[0], file)
            return file
    raise TransportError(
        f"no engine has written where its weights are; looked for {', '.join(map(str, files))}"
        f"{'' if folders else ' (LOGDIR is not set)'}; start the engine with shared weights first, with the same LOGDIR"
    )


def _file(place: Path) -> Path:
    """A folder need not exist yet."""
    return place if place.suffix == ".json" or place.is_file() else place / VLLM_FILE


def write_json(path: Path, fields: Mapping[str, Any]) -> Path:
    """Write a file that this user alone can read, aside and then renamed: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(fields, file, indent=2)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    return path
