"""Checksums against Python's own integers; shards add up; whatever moves or changes shows; the kernel agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.transport import checksums as module
from tandem.transport.checksums import ChecksumCache, ChecksumTally, Shard, checksums, digest

ROOT = Path(__file__).parents[2]
MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64]


def weight(seed: int, index: int) -> int:
    """Splitmix64 (Steele, Lea and Flood 2014), made odd, in plain integers."""
    x = ((index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) | 1


def reference(tensor: Tensor, row: int = 0, column: int = 0) -> int:
    """The definition, element by element, from the bytes."""
    size = tensor.element_size()
    columns = tensor.numel() if tensor.ndim < 2 else tensor[0].numel()
    if tensor.ndim < 2:
        row, column = column, row
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if size == 8:
        size, columns, column = 4, columns * 2, column * 2
    total = 0
    for i in range(len(data) // size):
        bits = int.from_bytes(data[i * size : (i + 1) * size], "little")
        r, c = divmod(i, columns)
        total += weight(module.ROW_SEED, row + r) * bits * weight(module.COLUMN_SEED, column + c)
    return total & MASK


def checksum(tensor: Tensor, first: tuple[int, int] = (0, 0)) -> int:
    return ChecksumTally([Shard("w", tensor, first)]).take()["w"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern may occur: both signs, denormals, infinities, NaNs with payloads."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (37,), (5, 7), (64, 32), (1, 9), (9, 1), (3, 4, 5)], ids=str)
def test_is_what_it_is_defined_to_be(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(shape, dtype)
    assert checksum(tensor) == reference(tensor)
    assert checksum(tensor, first=(70000, 0)) == reference(tensor, 70000)


def test_scalars_and_nothing() -> None:
    assert checksum(torch.tensor(1.5)) == reference(torch.tensor([1.5]))
    assert checksum(torch.empty(0, 4)) == 0


@pytest.mark.slow
@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    cuts=st.tuples(st.lists(st.integers(1, 23), max_size=3), st.lists(st.integers(1, 23), max_size=3)),
    dtype=st.sampled_from(DTYPES),
)
def test_shards_add_up(rows: int, columns: int, cuts: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    """Views cut by rows and columns, whatever the cuts."""
    tensor = random_bits((rows, columns), dtype)
    across, down = (
        sorted({0, size, *(c for c in cut if c < size)}) for cut, size in zip(cuts, tensor.shape, strict=True)
    )
    shards = [
        Shard("w", tensor[top:bottom, left:right], (top, left))
        for top, bottom in pairwise(across)
        for left, right in pairwise(down)
    ]
    assert ChecksumTally(shards).take() == {"w": checksum(tensor)}
    if len(shards) > 1 and dtype is not torch.bool:
        assert ChecksumTally(shards[1:]).take() != {"w": checksum(tensor)}


def test_vectors_shard_by_rows() -> None:
    bias = random_bits((10,), torch.bfloat16)
    assert (checksum(bias[:3]) + checksum(bias[3:], first=(3, 0))) & MASK == checksum(bias)


def test_every_bit_counts() -> None:
    tensor = random_bits((6, 5), torch.float32)
    raw = tensor.view(torch.int32)
    want = checksum(tensor)
    seen = {want}
    for index in range(raw.numel()):
        for bit in range(32):
            flip = -(1 << 31) if bit == 31 else 1 << bit
            raw.view(-1)[index] ^= flip
            seen.add(checksum(tensor))
            raw.view(-1)[index] ^= flip
    assert len(seen) == 1 + 30 * 32
    assert checksum(tensor) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_moves_shows(dtype: torch.dtype) -> None:
    tensor = torch.randn(12, 12, dtype=torch.float64).to(dtype)
    tensor[3, 4], tensor[7, 2] = 1.0, -1.0
    sums = {checksum(tensor)}
    for moved in (
        tensor.T,
        tensor.flip(0),
        tensor.flip(1),
        tensor.roll(1, 0),
        tensor.roll(1, 1),
        torch.cat([tensor[6:], tensor[:6]]),
        -tensor,
        tensor.view(6, 24),
    ):
        assert checksum(moved) == reference(moved)
        sums.add(checksum(moved))
    swapped = tensor.clone()  # two elements that differ in nothing but the highest bit
    swapped[3, 4], swapped[7, 2] = -1.0, 1.0
    sums.add(checksum(swapped))
    assert len(sums) == 10


def test_large_tensors_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of rows and of columns, the last ones short; row strides of a slice."""
    wide = random_bits((7, 300), torch.bfloat16)
    want, part = checksum(wide), checksum(wide[2:6, 10:290], first=(2, 10))
    for chunk in (64, 512, 1000):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        assert checksum(wide) == want == reference(wide)
        assert checksum(wide[2:6, 10:290], first=(2, 10)) == part == reference(wide[2:6, 10:290], 2, 10)


def test_weights_do_not_change_as_their_table_grows() -> None:
    before = module._weights(module.ROW_SEED, 1, torch.device("cpu"))[:4].clone()
    after = module._weights(module.ROW_SEED, 1 << 18, torch.device("cpu"))
    assert len(after) >= 1 << 18
    assert torch.equal(before, after[:4])
    assert int(after[200000]) & MASK == weight(module.ROW_SEED, 200000)


def test_a_tally_reads_what_is_there_now() -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.nn.Parameter(torch.randn(5))}
    tally = ChecksumTally(Shard(name, tensor) for name, tensor in weights.items())
    assert tally.take() == checksums(weights.items())
    weights["a"][1, 1] += 1
    assert tally.take()["a"] == reference(weights["a"])


def test_tensors_at_the_place_of_others_are_taken_as_they_are() -> None:
    memory, standing = torch.randn(8, 6), ChecksumCache()
    for now in (memory[:4], memory, memory[:, :4], memory.view(6, 8), memory.flatten()):
        assert standing.take([Shard("a", now)]) == checksums([("a", now)])


def test_digest_names_the_whole() -> None:
    sums = {"b": 2, "a": 1}
    assert digest(sums) == digest({"a": 1, "b": 2}) == digest(dict(sums))
    assert len(digest(sums)) == 16
    assert len({digest(sums), digest({"a": 2, "b": 1}), digest({"a": 1}), digest({"a": 1, "b": 3})}) == 4


def test_wide_loads_are_promised_only_where_they_hold() -> None:
    """No interpreter sees a misaligned load; a GPU stops at it."""
    store = torch.zeros(64 * 64 + 1, dtype=torch.int16)
    base = store[: 64 * 64].view(64, 64)
    assert base.data_ptr() % 16 == 0
    assert module._aligned(base)
    assert module._aligned(base[3:, 16:48])
    assert not module._aligned(store[1:].view(64, 64))  # begins at 2 bytes past 16
    assert not module._aligned(base[:, :40])  # ends within 16 elements
    assert not module._aligned(base.view(-1)[:4000].view(50, 80)[:, :72].as_strided((50, 64), (72, 1)))  # rows drift


def test_what_is_stored_the_other_way_around_is_summed_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DEVICE_CHUNK", 100)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        experts = random_bits((4, 60), dtype)[1:].view(3, 6, -1).transpose(1, 2)
        for tensor, first in ((experts, (1, 0)), (experts[0], (3, 5)), (experts[0, 0], (7, 0))):
            assert int(module._sum_transposed(Shard("a", tensor, first))) % 2**64 == checksum(tensor, first=first)


NO_TRITON = 77
"""What the program below ends with in an environment that has none."""
KERNEL = """
import sys, warnings
warnings.simplefilter("ignore")
try:
    import triton
except ImportError:
    sys.exit(77)
import torch
from tandem.transport import checksums as module
from tandem.transport.checksums import ChecksumTally, Shard, _DeviceTally

MASK = (1 << 64) - 1
_DeviceTally.TILE = (8, 32)  # many tiles of small tensors
torch.manual_seed(0)
whole = torch.randint(0, 256, (12, 192), dtype=torch.uint8)  # a tile takes the interpreter some 10 ms
cases = []
for dtype in (getattr(torch, name) for name in sys.argv[1:]):
    t = whole.view(dtype)[:, :96]
    cases += [(t, (0, 0)), (t[3:], (3, 0)), (t[:, 5:], (0, 5)), (t[9:, 1:2], (70000, 1)), (t[0], (0, 0))]
    cases += [(t.T, (0, 0)), (t[:, :12].reshape(3, 4, -1)[1:].transpose(1, 2), (1, 0))]  # experts, the other way around
cases += [(whole.view(torch.bfloat16), (0, 0))]  # far from the others of its kind
cases += [(whole[4, 3:90].clone(), (8, 0)), (torch.tensor([1.5]), (0, 0))]
tally = _DeviceTally([(i, Shard("t", *case)) for i, case in enumerate(cases)], len(cases))
assert {aligned for _, aligned, _, _ in tally._launches} == {True, False}
for _ in range(2):
    tally.launch()
    got = [value & MASK for value in tally.sums.tolist()]
    want = [ChecksumTally([Shard("t", t, first)]).take()["t"] for t, first in cases]
    assert got == want, [(i, cases[i][0].shape, cases[i][0].dtype) for i in range(len(cases)) if got[i] != want[i]]
"""


@pytest.mark.slow
def test_the_cuda_kernel_computes_the_same(long: bool) -> None:
    """Under triton's interpreter, which runs kernels on CPU tensors, in whichever environment has triton."""
    dtypes = ["bfloat16", "float32", "float64", "int8"] if long else ["bfloat16"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    for python in (sys.executable, str(ROOT / ".venv-engine" / "bin" / "python")):
        if Path(python).exists():
            ran = subprocess.run([python, "-c", KERNEL, *dtypes], env=env, capture_output=True, text=True)
            if ran.returncode != NO_TRITON:
                assert ran.returncode == 0, ran.stderr
                return
    pytest.skip("triton is in neither environment: the kernel is checked where torch has CUDA")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_and_cpu_agree() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int8):
        host = random_bits((700, 1056), dtype)
        device = host.cuda()
        assert checksum(device) == checksum(host)
        assert checksum(device[3:600], first=(3, 0)) == checksum(host[3:600], first=(3, 0))
        assert checksum(device[:, 5:], first=(0, 5)) == checksum(host[:, 5:], first=(0, 5))
        assert checksum(device[0]) == checksum(host[0])
        assert checksum(device.view(7, 100, -1).transpose(1, 2)) == checksum(host.view(7, 100, -1).transpose(1, 2))
