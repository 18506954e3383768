"""Lent tensors: one copy of the bytes in two processes, whoever dies first."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.second_process import second_process
from torch import Tensor

from tandem.errors import TransportError
from tandem.transport import sharing
from tandem.transport.sharing import attach, export_cuda, export_host, remove_orphans


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Any file system that maps files will do; memory is only faster."""
    return tmp_path


def weights() -> dict[str, Tensor]:
    fused = torch.randn(6, 4, dtype=torch.bfloat16)
    tied = torch.randn(5, 3)
    return {
        "q": fused[:3],
        "k": fused[3:5],
        "embed": tied,
        "head": tied,
        "small": torch.tensor([1, 2, 3], dtype=torch.int8),
        "turned": torch.randn(4, 7).t(),
        "nan": torch.tensor([float("nan"), -0.0], dtype=torch.float16),
        "scale": torch.tensor(2.5, dtype=torch.float64),
    }


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.slow
def test_each_side_sees_the_others_writes(folder: Path) -> None:
    originals = weights()
    exported = export_host(originals, folder / "w")
    with second_process() as peer:
        assert peer("attach", description=exported.description) is None
        for name, tensor in originals.items():
            if name != "nan":
                assert peer("read", name=name) == tensor.double().tolist()
        exported.tensors["k"].fill_(-3)
        assert peer("read", name="k") == [[-3.0] * 4] * 2
        peer("fill", name="embed", value=7)
    assert exported.tensors["head"].eq(7).all()
    assert torch.equal(exported.tensors["q"], originals["q"])


def test_tensors_come_back_as_they_were(folder: Path) -> None:
    originals = weights()
    exported = export_host(originals, folder / "w")
    attached = attach(json.loads(json.dumps(exported.description)))
    for name, tensor in originals.items():
        for mapped in (exported.tensors[name], attached[name]):
            assert (mapped.shape, mapped.dtype, mapped.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
            assert bits(mapped) == bits(tensor)
            assert mapped.data_ptr() != tensor.data_ptr()
    assert list(exported.tensors) == list(attached) == list(originals)


@pytest.mark.parametrize("side", ["lender", "borrower"])
def test_aliases_stay_aliases_and_others_stay_apart(folder: Path, side: str) -> None:
    exported = export_host(weights(), folder / "w")
    tensors = exported.tensors if side == "lender" else attach(exported.description)
    storage = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
    assert tensors["embed"].data_ptr() == tensors["head"].data_ptr()
    assert storage["q"].data_ptr() == storage["k"].data_ptr()
    assert tensors["k"].data_ptr() - tensors["q"].data_ptr() == 3 * 4 * 2
    assert len({s.data_ptr() for s in storage.values()}) == 6
    # What saves or counts a tensor by its storage must not get the whole file.
    assert storage["small"].nbytes() == 3
    assert storage["embed"].nbytes() == 5 * 3 * 4


@pytest.mark.slow
def test_there_is_no_second_copy() -> None:
    size = 64 << 20
    path = sharing.SHARED_MEMORY / f"tandem-test-{os.getpid()}"
    exported = export_host({"w": torch.zeros(size, dtype=torch.uint8)}, path)
    try:
        with second_process() as peer:
            peer("attach", description=exported.description)
            grown = peer("add_everywhere")
        assert grown["RssShmem"] >= size
        assert grown["RssAnon"] < size / 8
        assert exported.tensors["w"].eq(1).all()
    finally:
        exported.close()


@pytest.mark.slow
def test_memory_survives_its_lender(folder: Path) -> None:
    path = folder / "w"
    with second_process() as lender:
        description = lender("lend", path=str(path))
        attached = attach(description)
        remove_orphans(folder)
        lender.kill()
    assert path.exists()
    remove_orphans(folder)
    assert not path.exists()
    attached["w"].add_(1)
    assert attached["w"].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TransportError, match="ended or was restarted"):
        attach(description)


def test_closing_takes_the_name_and_leaves_the_memory(folder: Path) -> None:
    exported = export_host({"w": torch.ones(3)}, folder / "w")
    attached = attach(exported.description)
    assert (folder / "w").stat().st_mode & 0o777 == 0o600
    exported.close()
    exported.close()
    assert list(folder.iterdir()) == []
    attached["w"].fill_(4)
    assert exported.tensors["w"].tolist() == [4, 4, 4]


@pytest.mark.slow
def test_a_lender_that_ends_by_itself_leaves_nothing_and_a_forked_child_takes_nothing_away(folder: Path) -> None:
    code = (
        "import os, pathlib, sys, torch\n"
        "from tandem.transport.sharing import export_host\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "lent = export_host({'w': torch.ones(3)}, path)\n"
        "left = export_host({'w': torch.ones(3)}, path.with_name('left'))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    lent.close()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert path.exists()\n"
        "lent.close()\n"
        "assert not path.exists()\n"
        "print(path.with_name('left').exists())\n"
    )
    done = run(code, str(folder / "w"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert list(folder.iterdir()) == []


def test_orphans_are_only_our_own(folder: Path) -> None:
    (folder / "theirs").write_bytes(b"something else")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "theirs")
    live = export_host({"w": torch.ones(3)}, folder / "live")
    remove_orphans(folder)
    assert len(list(folder.iterdir())) == 5
    assert attach(live.description)["w"].tolist() == [1, 1, 1]
    remove_orphans(folder / "none")  # as a system without /dev/shm has it


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(0, 4), r"\(0, 4\) on cpu\) cannot be lent"),
        (torch.empty(2, device="meta"), "on meta.*cannot be lent"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_lent_is_named(folder: Path, tensor: Tensor, why: str) -> None:
    with pytest.raises(TransportError, match=f"bad.*{why}"):
        export_host({"good": torch.ones(1), "bad": tensor}, folder / "w")
    assert list(folder.iterdir()) == []


def test_a_file_that_exists_is_left_alone(folder: Path) -> None:
    (folder / "w").write_text("mine")
    with pytest.raises(FileExistsError):
        export_host({"w": torch.ones(1)}, folder / "w")
    assert (folder / "w").read_text() == "mine"


def test_too_little_memory_is_said_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"MiB free, but 0 MiB are to be lent.*shm-size"):
        export_host({"w": torch.ones(1)}, folder / "w")
    assert list(folder.iterdir()) == []


def test_the_file_of_a_restarted_lender_is_not_mistaken(folder: Path) -> None:
    first = export_host({"w": torch.ones(3)}, folder / "w")
    stale = first.description
    first.close()
    second = export_host({"w": torch.zeros(3)}, folder / "w")
    with pytest.raises(TransportError, match=r"not the file that was described.*new description"):
        attach(stale)
    assert attach(second.description)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "torch.bfloat17"}, "bfloat17"),
        ({"dtype": "torch.float64"}, "needs 96 bytes of a storage of 48, but 48"),
        ({"shape": [4, 4]}, "w needs 64 bytes of a storage of 48, but 48"),
        ({"stride": [4, 2]}, "w needs 60 bytes"),
        ({"tensor_storage_offset": 1}, "w needs 52 bytes"),
        ({"storage_size": 1 << 20}, "w: the file has 128 bytes"),
        ({"storage_offset": 0}, "w: the file has 128 bytes"),
        ({"storage_offset": "x"}, "invalid literal"),
        ({"shape": None}, "NoneType"),
    ],
)
def test_a_wrong_description_of_a_tensor_is_refused(folder: Path, change: dict[str, Any], why: str) -> None:
    exported = export_host({"w": torch.ones(3, 4)}, folder / "w")
    wrong = copy.deepcopy(exported.description)
    wrong["tensors"]["w"].update(change)
    with pytest.raises(TransportError, match=why):
        attach(wrong)


# --- CUDA: what is told, without a GPU; what is true, with one ---


class FakeGpus:
    """Exports host storages under handles, and opens them as the driver would in the other process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exported: dict[bytes, torch.UntypedStorage] = {}
        self.opened: list[tuple[Any, ...]] = []
        self.visible = ["GPU-a", "GPU-b"]
        self.letter = b"c"
        monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", self.share(), raising=False)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", self.open, raising=False)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.visible))
        monkeypatch.setattr(sharing, "gpu_uuid", lambda index: self.visible[index])
        monkeypatch.setattr(sharing, "_refuse", lambda *_: None)

    def share(self) -> Any:
        def _share_cuda_(storage: torch.UntypedStorage) -> tuple[Any, ...]:
            handle = b"\x02" + self.letter + bytes([len(self.exported)]) * (64 if self.letter == b"c" else 40)
            self.exported[handle] = storage
            return 1, handle, storage.nbytes(), 512, b"/counter", 3, b"\xff\x00event", True

        return _share_cuda_

    def open(self, *arguments: Any) -> torch.UntypedStorage:
        self.opened.append(arguments)
        if arguments[1] not in self.exported:
            raise RuntimeError("CUDA error: invalid resource handle\nand a page of advice")
        return self.exported[arguments[1]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus(monkeypatch)


def test_cuda_handles_travel_as_json(gpus: FakeGpus) -> None:
    originals = weights()
    description = json.loads(json.dumps(export_cuda(originals)))
    assert set(description["tensors"]["k"]) == {
        "device_index", "device_uuid", "ipc_handle_b64", "storage_size", "storage_offset", "ref_counter_handle_b64",
        "ref_counter_offset", "event_handle_b64", "event_sync_required", "shape", "dtype", "stride",
        "tensor_storage_offset",
    }  # fmt: skip
    assert len(gpus.exported) == 6  # a handle for each storage, not for each tensor
    gpus.visible = ["GPU-c", "GPU-d", "GPU-b"]  # numbered otherwise here
    attached = attach(description)
    assert len(gpus.opened) == 6
    assert {arguments[0] for arguments in gpus.opened} == {2}
    assert {arguments[3:] for arguments in gpus.opened} == {(512, b"/counter", 3, b"\xff\x00event", True)}
    for name, tensor in originals.items():
        assert attached[name].data_ptr() == tensor.data_ptr()
        assert (attached[name].shape, attached[name].stride()) == (tensor.shape, tensor.stride())
        assert attached[name].dtype == tensor.dtype


def test_a_gpu_that_is_not_visible_is_named(gpus: FakeGpus) -> None:
    description = export_cuda({"w": torch.ones(2)})
    gpus.visible = ["GPU-c"]
    with pytest.raises(TransportError, match=r"GPU-b, but this process sees GPU-c.*CUDA_VISIBLE_DEVICES"):
        attach(description)


def test_a_stale_cuda_handle_says_what_to_do(gpus: FakeGpus) -> None:
    description = export_cuda({"w": torch.ones(2)})
    gpus.exported.clear()
    with pytest.raises(TransportError, match=r"invalid resource handle\);.*new description$"):
        attach(description)


def test_expandable_segments_are_refused(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.letter = b"e"
    with pytest.raises(TransportError, match=r"w lies in an expandable segment.*PYTORCH_CUDA_ALLOC_CONF"):
        export_cuda({"w": torch.ones(2)})

    def fails(_: torch.UntypedStorage) -> None:
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", fails, raising=False)
    with pytest.raises(TransportError, match=r"w cannot be exported.*sleep mode"):
        export_cuda({"w": torch.ones(2)})


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_gpu
def test_gpu_memory_is_one_for_both() -> None:
    fused = torch.randn(1 << 20, 16, dtype=torch.bfloat16, device="cuda")
    originals = {"q": fused[: 1 << 19], "k": fused[1 << 19 :], "scale": torch.tensor(2.5, device="cuda")}
    description = export_cuda(originals)
    with pytest.raises(TransportError, match="cannot be attached"):
        attach(description)  # the driver opens a handle in another process only
    with second_process() as peer:
        for _ in range(2):  # and again, as after a restart of the borrower
            assert peer("attach", description=description) is None
            assert peer("allocated") == 0
            assert peer("read", name="scale") == originals["scale"].item()
            originals["scale"].add_(1)
            torch.cuda.synchronize()
            assert peer("read", name="scale") == originals["scale"].item()
            peer("fill", name="k", value=-3)
            assert originals["k"].eq(-3).all()
            assert not originals["q"].eq(-3).all()
            peer("forget")
    with second_process() as peer:  # a borrower that was killed keeps nobody out
        assert peer("attach", description=description) is None
        assert peer("read", name="scale") == originals["scale"].item()
