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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import TransportError
from tandem.transport import sharing

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

VLLM_FILE = "vllm_bridge_config.json"
"""Written by the engine."""
NCCL_FILE = "nccl_bridge_config.json"
"""Written by the trainer, beside its checkpoints."""
LAST_RESORT = Path("/tmp/atropos_bridge")
"""Looked into when the engine's file is nowhere else."""


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """One parameter of the engine."""

    vllm_name: str
    """The engine's name of it."""
    shape: list[int]
    """Its shape there."""
    dtype: str
    """Such as ``torch.bfloat16``."""
    device: str
    """Such as ``cuda:0``."""

    @classmethod
    def of(cls, vllm_name: str, tensor: Tensor) -> Mapped:
        """Describe a parameter."""
        return cls(vllm_name=vllm_name, shape=list(tensor.shape), dtype=str(tensor.dtype), device=str(tensor.device))


@dataclass(frozen=True, kw_only=True)
class VllmBridge:
    """What ``vllm_bridge_config.json`` holds; a count, ``num_params``, is added on writing and checked on reading."""

    model: str
    """Path or name of the model that the engine loaded."""
    tp_degree: int = 1
    """Tensor-parallel ranks of the engine."""
    dp_shard_degree: int = 1
    """Ranks over which each parameter is sharded for data parallelism."""
    param_names: list[str]
    """Every parameter's name."""
    param_mappings: dict[str, Mapped]
    """The parameters by name."""
    ipc_handles: dict[str, dict[str, Any]]
    """Where each parameter's memory is: ``tensors`` of what ``sharing`` describes."""
    shared_weights_enabled: bool = True
    """The engine samples from the memory that it describes here."""
    single_copy_enabled: bool = True
    """That memory can be attached."""
    tandem: dict[str, Any] = field(default_factory=dict)
    """``lent``: the rest of the description, which tells files on the host from CUDA handles."""

    @classmethod
    def describing(cls, model: str, lent: Mapping[str, Any], params: Mapping[str, Mapped], **more: Any) -> VllmBridge:
        """The file of an engine that lends ``lent``, a description as ``sharing.attach`` takes it.

        Args:
            model: path or name of what the engine loaded.
            lent: the description.
            params: the parameters by name.
            more: other fields; entries of ``tandem`` are kept.
        """
        tandem = {**more.pop("tandem", {}), "lent": {key: value for key, value in lent.items() if key != "tensors"}}
        handles = {name: dict(entry) for name, entry in lent["tensors"].items()}
        return cls(
            model=model,
            param_names=sorted(params),
            param_mappings=dict(params),
            ipc_handles=handles,
            single_copy_enabled=bool(handles),
            tandem=tandem,
            **more,
        )

    def description(self) -> dict[str, Any]:
        """What ``sharing.attach`` takes; a file without ``tandem`` is of CUDA handles.

        Raises:
            TransportError: the engine lends nothing.
        """
        if not self.ipc_handles:
            raise TransportError(
                f"the engine of {self.model!r} lends no memory (its {VLLM_FILE} has no ipc_handles); start it with "
                "shared weights"
            )
        return {"kind": "cuda", **self.tandem.get("lent", {}), "tensors": self.ipc_handles}

    @classmethod
    def lending(cls, model: str, lent: Mapping[str, Any], places: Mapping[str, Any], **more: Any) -> VllmBridge:
        """The file of an engine that lends ``lent``, in which each Hugging Face tensor lies at its ``places``."""
        device = next(iter(places.values()))[0]["device"]
        params = {
            name: Mapped(vllm_name=name, shape=list(entry["shape"]), dtype=str(entry["dtype"]), device=device)
            for name, entry in lent["tensors"].items()
        }
        return cls.describing(model, lent, params, tandem={"places": dict(places), **more})

    def attach(self) -> dict[str, Tensor]:
        """Every weight by its Hugging Face name, as a view into the engine's memory.

        Raises:
            TransportError: the memory cannot be reached, or the file does not say where these weights lie in it.
        """
        places = self.tandem.get("places")
        if not isinstance(places, dict) or self.tp_degree != 1:
            raise TransportError(
                f"the {VLLM_FILE} of {self.model!r} does not say where Hugging Face's tensors lie in the engine's; let "
                "an engine of one process write it: tandem serve engine RECIPE"
            )
        attached = sharing.attach(self.description())
        out = {}
        for name, (place,) in places.items():
            tensor = attached[place["vllm_name"]]
            first = tensor.storage_offset() + place["offset"]
            out[name] = tensor.as_strided(place["size"], place["stride"], first)
        return out

    def write(self, path: Path) -> Path:
        """Write the file, at ``path`` or in the folder ``path``, complete or not at all; returns where it is."""
        return _write(path, VLLM_FILE, {**asdict(self), "num_params": len(self.param_names)})

    @classmethod
    def read(cls, path: Path) -> VllmBridge:
        """Read the file, at ``path`` or in the folder ``path``.

        Raises:
            TransportError: it is missing, another user's, torn or incomplete; the message says which fields lack.
        """
        path, fields = _read(path, VLLM_FILE)
        _require(path, "", fields, _VLLM_FIELDS)
        for name, mapped in fields["param_mappings"].items():
            _require(path, f"param_mappings.{name}: ", mapped, _MAPPED_FIELDS)
        if fields["num_params"] != len(fields["param_names"]):
            raise TransportError(
                f"{path} counts {fields['num_params']} parameters but names {len(fields['param_names'])}; it was "
                "changed by hand or by another program: let the engine write it again"
            )
        known = {key: fields[key] for key in _VLLM_FIELDS if key != "num_params"}
        known["param_mappings"] = {
            name: Mapped(**{key: mapped[key] for key in _MAPPED_FIELDS})
            for name, mapped in fields["param_mappings"].items()
        }
        tandem = fields.get("tandem", {})
        return cls(**known, tandem=tandem if isinstance(tandem, dict) else {})


@dataclass(frozen=True, kw_only=True)
class NcclBridge:
    """What ``nccl_bridge_config.json`` holds."""

    nccl_init_method: str
    """Where the group meets, such as ``tcp://localhost:29500``."""
    world_size: int
    """Its members, the trainer included."""
    param_metadata: dict[str, Any]
    """Shape and dtype of everything that travels, by the trainer's name."""
    param_mappings: dict[str, Any]
    """The engine's name of each."""
    nccl_enabled: bool = True
    """Weights travel through the group."""
    tandem: dict[str, Any] = field(default_factory=dict)
    """What only Tandem needs, such as the backend."""

    def write(self, path: Path) -> Path:
        """Write the file, at ``path`` or in the folder ``path``, complete or not at all; returns where it is."""
        return _write(path, NCCL_FILE, asdict(self))

    @classmethod
    def read(cls, path: Path) -> NcclBridge:
        """Read the file, at ``path`` or in the folder ``path``.

        Raises:
            TransportError: it is missing, another user's, torn or incomplete; the message says which fields lack.
        """
        path, fields = _read(path, NCCL_FILE)
        _require(path, "", fields, _NCCL_FIELDS)
        tandem = fields.get("tandem", {})
        return cls(**{key: fields[key] for key in _NCCL_FIELDS}, tandem=tandem if isinstance(tandem, dict) else {})


def find(path: Path | None = None) -> Path:
    """The engine's file: at ``path``, in ``$LOGDIR``, in the working directory, or in ``LAST_RESORT``, in this order.

    A path that was given but is not there is reported when the file is found elsewhere.

    Raises:
        TransportError: it is in none of these places.
    """
    folders = [Path(os.environ["LOGDIR"])] if os.environ.get("LOGDIR") else []
    places = [*([path] if path else []), *folders, Path.cwd(), LAST_RESORT]
    files = [_file(place, VLLM_FILE) for place in places]
    for file in files:
        if file.is_file():
            if path and file is not files[0]:
                log.warning("%s does not exist; the engine's weights are found by %s instead", files[0], file)
            return file
    raise TransportError(
        f"no engine has written where its weights are; looked for {', '.join(map(str, files))}"
        f"{'' if folders else ' (LOGDIR is not set)'}; start the engine with shared weights first, with the same LOGDIR"
    )


_VLLM_FIELDS: dict[str, type] = {
    "model": str,
    "tp_degree": int,
    "dp_shard_degree": int,
    "param_names": list,
    "param_mappings": dict,
    "ipc_handles": dict,
    "shared_weights_enabled": bool,
    "single_copy_enabled": bool,
    "num_params": int,
}
_MAPPED_FIELDS: dict[str, type] = {"vllm_name": str, "shape": list, "dtype": str, "device": str}
_NCCL_FIELDS: dict[str, type] = {
    "nccl_enabled": bool,
    "nccl_init_method": str,
    "world_size": int,
    "param_metadata": dict,
    "param_mappings": dict,
}


def _require(path: Path, where: str, fields: Any, types: Mapping[str, type]) -> None:
    if not isinstance(fields, dict):
        raise TransportError(f"{path}: {where}expected a JSON object, not {type(fields).__name__}")
    if missing := [key for key in types if key not in fields]:
        raise TransportError(
            f"{path}: {where}there is no {', '.join(missing)}; an engine writes its parameters only once they are "
            "shared: start it with shared weights, or let it write the file again"
        )
    for key, kind in types.items():
        if not isinstance(fields[key], kind):
            raise TransportError(f"{path}: {where}{key} should be a {kind.__name__}, not {fields[key]!r:.60}")


def _file(place: Path, name: str) -> Path:
    """A folder need not exist yet."""
    return place if place.suffix == ".json" or place.is_file() else place / name


def _read(place: Path, name: str) -> tuple[Path, Any]:
    path = _file(place, name)
    try:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            if owner not in (0, os.geteuid()):
                # It names memory and files to be written to, and may lie where everybody can write.
                raise TransportError(f"{path} belongs to user {owner}; give the path of a file of your own engine")
            return path, json.load(file)
    except OSError as error:
        raise TransportError(f"{path} cannot be read ({error.strerror}); is the engine running?") from error
    except ValueError as error:
        raise TransportError(f"{path} is not JSON ({error}); let its program write it again") from error


def _write(place: Path, name: str, fields: Mapping[str, Any]) -> Path:
    """Aside, then renamed: who reads never sees half a file. Only this user can read it."""
    path = _file(place, name)
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
