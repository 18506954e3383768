"""The CUDA kernel of the checksums. Importing this needs triton, which comes with torch's CUDA builds."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


def word(size: int) -> Any:
    """The unsigned type of so many bytes."""
    return {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}[size]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sum_tiles(  # type: ignore[no-untyped-def]
    table,
    owners,
    row_weights,
    column_weights,
    sums,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add one tile of one matrix to its sum.

    ``table`` has eight int64 for each matrix: address, row stride in elements, rows, columns, first row, first column,
    its first tile, and the index of its sum. Integers wrap around and commute, so the order of the additions is free.
    """
    tile = tl.program_id(0)
    entry = table + tl.load(owners + tile) * 8
    stride = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    matrix = tl.load(entry).to(tl.pointer_type(WORD))
    local = tile - tl.load(entry + 6)
    across = tl.cdiv(columns, COLUMNS)
    top = (local // across) * ROWS
    c = (local % across) * COLUMNS + tl.arange(0, COLUMNS)
    a = row_weights + tl.load(entry + 4)
    inside = c < columns
    total = tl.zeros((SPAN, COLUMNS), tl.int64)
    for start in tl.range(0, ROWS, SPAN, num_stages=4):
        r = top + start + tl.arange(0, SPAN)
        here = r < rows
        pointers = matrix + (r[:, None] * stride + c[None, :])
        if ALIGNED:  # a row begins at 16 bytes: with this the compiler loads 16 bytes at a time
            pointers = tl.multiple_of(pointers, (1, 16))
        x = tl.load(pointers, mask=here[:, None] & inside[None, :], other=0)
        total += x.to(tl.int64) * tl.load(a + r, mask=here, other=0)[:, None]
    b = tl.load(column_weights + tl.load(entry + 5) + c, mask=inside, other=0)
    tl.atomic_add(sums + tl.load(entry + 7), tl.sum(tl.sum(total * b[None, :], axis=0), axis=0))
