"""The files by which engine and trainer find each other's weights: complete, in order, and theirs are read too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import TransportError
from tandem.transport import bridge
from tandem.transport.bridge import VLLM_FILE, MappedParameter, VllmBridge, find
from tandem.transport.sharing import export_host

THEIRS: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-3B-Instruct",
    "tp_degree": 1,
    "dp_shard_degree": 1,
    "param_names": ["norm.weight"],
    "param_mappings": {
        "norm.weight": {
            "vllm_name": "norm.weight",
            "shape": [4],
            "dtype": "torch.bfloat16",
            "device": "cuda:0",
            "later": 1,
        }
    },
    "ipc_handles": {"norm.weight": {"device_index": 0, "ipc_handle_b64": "AmM="}},
    "shared_weights_enabled": True,
    "single_copy_enabled": True,
    "num_params": 1,
    "vllm_version": "0.11",
}
"""As Atropos' engine writes it, with fields that nobody has told us of."""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a last resort, of this test's own."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(bridge, "LAST_RESORT", tmp_path / "last")
    return tmp_path


def put(file: Path, fields: Any = THEIRS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields))
    return file


def places_of(*names: str) -> dict[str, Any]:
    """Each tensor at the beginning of the parameter of its name."""
    return {n: [{"vllm_name": n, "device": "cpu", "size": [2, 3], "stride": [3, 1], "offset": 0}] for n in names}


def test_what_an_engine_exports_is_attached_by_its_file(tmp_path: Path) -> None:
    weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    exported = export_host({"b": weight, "a": -weight}, tmp_path / "w")
    file = VllmBridge.of_places("some/model", exported.description, places_of("b", "a"), version=3)
    path = file.write(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / VLLM_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    vllm_bridge = VllmBridge.read(path)
    assert vllm_bridge == file
    assert vllm_bridge.tandem["version"] == 3
    assert torch.equal(vllm_bridge.attach()["b"], weight)
    fields = json.loads(path.read_text())
    assert set(fields) == {*THEIRS, "tandem"} - {"vllm_version"}, "the fields that others read"
    assert fields["param_names"] == ["a", "b"]
    assert fields["param_mappings"]["a"] == {
        "vllm_name": "a", "shape": [2, 3], "dtype": "torch.bfloat16", "device": "cpu",
    }  # fmt: skip
    assert fields["ipc_handles"] == exported.description["tensors"]


def test_their_file_is_read(tmp_path: Path) -> None:
    vllm_bridge = VllmBridge.read(put(tmp_path / "theirs.json"))
    assert vllm_bridge.model == THEIRS["model"]
    assert vllm_bridge.param_mappings["norm.weight"] == MappedParameter(
        vllm_name="norm.weight", shape=[4], dtype="torch.bfloat16", device="cuda:0"
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"param_mappings": {"x": {"vllm_name": "x"}}}, r"missing required field `shape` - at `\$\.param_mappings"),
        ({"tp_degree": "two"}, "Expected `int`, got `str` - at `\\$.tp_degree`"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = put(tmp_path / VLLM_FILE, {**THEIRS, **change})
    with pytest.raises(TransportError, match=why):
        VllmBridge.read(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"model": "m", ', "truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"model": "\xff"}', "invalid start byte"),
        (b'{"tandem": {"lent": ' + b"[" * 100_000, "recursion"),
    ],
    ids=["truncated", "list", "bytes", "deep"],
)
def test_a_torn_file_is_said_to_be_one(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / VLLM_FILE).write_bytes(text)
    with pytest.raises(TransportError, match=why):
        VllmBridge.read(tmp_path)


def test_an_engine_that_lends_nothing_says_so(tmp_path: Path) -> None:
    vllm_bridge = VllmBridge.read(
        put(tmp_path / VLLM_FILE, {**THEIRS, "ipc_handles": {}, "single_copy_enabled": False})
    )
    with pytest.raises(TransportError, match="does not say where"):
        vllm_bridge.attach()


def test_another_users_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / VLLM_FILE)
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(TransportError, match="belongs to user"):
        VllmBridge.read(path)


def test_places_are_searched_in_order(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDIR", str(places / "logs"))
    folders = ["last", "cwd", "logs", "given"]
    for folder in folders:  # each is preferred to those before it
        file = put(places / folder / VLLM_FILE)
        assert find(places / "given").samefile(file)
        assert find(places / "given" / VLLM_FILE).samefile(file)
    assert find().samefile(places / "logs" / VLLM_FILE)
    monkeypatch.setenv("LOGDIR", "")
    assert find().samefile(places / "cwd" / VLLM_FILE)
