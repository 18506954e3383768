"""An adapter as a folder that PEFT and engines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem import machine
from tandem.lazy import Tensor


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write its two files: tensors by the names of PEFT's file, and ``adapter_config.json``."""
    from safetensors.torch import save_file  # which loads torch

    folder.mkdir(parents=True, exist_ok=True)
    owners: dict[int, str] = {}  # tied ones are there under each name, of which PEFT makes as many weights
    apart = {name: t if owners.setdefault(t.data_ptr(), name) == name else t.clone() for name, t in tensors.items()}
    save_file(apart, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(config), indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    machine.apply_umask(folder)
