"""Metrics of a run as rows and columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

from tandem.config.registry import did_you_mean
from tandem.errors import TandemError
from tandem.observability.report.folder import Row


class MetricsTable(Sequence[dict[str, float]]):
    """Metrics of a run: one row for each optimizer step, ascending.

    A row has ``step``, ``time`` (Unix seconds) and every metric of the step by name; one that was not finite is nan.

    Example:
        >>> import tandem
        >>> table = tandem.MetricsTable([{"step": 1, "time": 0.0, "metrics": {"reward": 0.25, "length": 12.0}}])
        >>> table.column("reward")
        [0.25]
        >>> table[-1]["step"], table.names
        (1, ['length', 'reward', 'step', 'time'])
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Rows as metrics.jsonl holds them."""
        self._rows = [
            {
                "step": row["step"],
                "time": float(row.get("time", math.nan)),
                **{name: math.nan if value is None else float(value) for name, value in row["metrics"].items()},
            }
            for row in rows
        ]

    @property
    def names(self) -> list[str]:
        """Every column, sorted."""
        return sorted({name for row in self._rows for name in row})

    def column(self, name: str) -> list[float]:
        """A metric of every step; nan for steps without it.

        Raises:
            TandemError: no step has it; names one that is alike.
        """
        if name not in self.names:
            raise TandemError(f"no step has a metric {name!r}{did_you_mean(name, self.names)}; see names for all")
        return [row.get(name, math.nan) for row in self._rows]

    def to_pandas(self) -> Any:
        """A pandas ``DataFrame`` with the step as its index.

        Raises:
            TandemError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise TandemError(
                f"to_pandas needs pandas, which cannot be imported ({error}); install it with: pip install pandas, or "
                "use column(name) and the rows as they are"
            ) from error
        return pandas.DataFrame(self._rows, columns=self.names).set_index("step")

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, float] | list[dict[str, float]]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<MetricsTable: {len(self)} steps, {len(self.names)} columns>"
