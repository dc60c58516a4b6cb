"""What each running sequence sees by itself: its tail.

A tail lies in one row of a preallocated buffer: copies of the cached nodes it alone looks at, then what it generates.
Columns of a row are in no particular order to attention (positions are already rotated into the keys); those in use
are told apart by an additive mask. Rows 0…B-1 are the running sequences, and a step computes every column of them:
matrix products over a part of the columns would copy that part first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longrein.engines.decoder import Shape

# Columns are allocated in such multiples, and given back when two of them are idle.
COLUMNS = 64


class Tails:
    """The buffer, (L, 2, B, Hk, T, D): keys, then values; and the mask, (B, Hk, T), 0 or -inf."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clear()

    @property
    def width(self) -> int:
        """T, the columns of every row."""
        return self.mask.shape[2]

    def clear(self) -> None:
        """Free the memory."""
        self._allocate(0, 0)

    def reserve(self, rows: int, columns: int, *, shrink: bool = False) -> None:
        """Make room for ``rows`` rows of ``columns``; what is there stays.

        Args:
            shrink: no row uses more than ``columns``, so that more of them than needed may go.
        """
        have_rows, have_columns = self.mask.shape[0], self.width
        if rows <= have_rows and columns <= have_columns and not (shrink and columns + 2 * COLUMNS <= have_columns):
            return
        buffer, mask = self.buffer, self.mask
        columns = -(-columns // COLUMNS) * COLUMNS
        self._allocate(max(rows, have_rows), columns if shrink else max(columns, have_columns))
        kept = min(have_columns, self.width)
        self.buffer[:, :, :have_rows, :, :kept] = buffer[..., :kept, :]
        # Whatever the mask hides must still be a number.
        self.buffer[:, :, :have_rows, :, kept:] = 0
        self.buffer[:, :, have_rows:] = 0
        self.mask[:have_rows, :, :kept] = mask[..., :kept]

    def fill(self, row: int, parts: Sequence[Tensor]) -> int:
        """Make ``parts``, (L, 2, Hk, n, D) each, the whole content of a row; return the columns used."""
        column = 0
        self.mask[row] = float("-inf")
        for part in parts:
            end = column + part.shape[3]
            self.buffer[:, :, row, :, column:end] = part
            column = end
        self.mask[row, :, :column] = 0
        return column

    def read(self, row: int, start: int, end: int) -> Tensor:
        """(L, 2, Hk, n, D): a copy of columns ``start`` to ``end``."""
        return self.buffer[:, :, row, :, start:end].clone()

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy a row of ``columns`` columns over another."""
        self.buffer[:, :, target, :, :columns] = self.buffer[:, :, source, :, :columns]
        self.mask[target] = self.mask[source]

    def _allocate(self, rows: int, columns: int) -> None:
        shape = self.shape
        size = (shape.layers, 2, rows, shape.kv_heads, columns, shape.head_dim)
        self.buffer = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.mask = torch.full(size[2:5], float("-inf"), dtype=shape.dtype, device=shape.device)
