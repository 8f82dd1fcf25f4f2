"""What a parity check found: one row for each thing compared, readable, and strict where a test wants it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """The largest relative error found in one thing that was compared.

    Attributes:
        what: the thing: a module's name in transformers, logits of a depth, or tokens.
        error: the absolute difference there. Of tokens: 0 where all are equal, else how far the reference's logits of
            the two tokens lie below its best one, where the texts first part.
        scale: the standard deviation of the module's output in the reference, plus the magnitude of the very number:
            trained models have a few activations hundreds of deviations large, which round in proportion to
            themselves. Of tokens: the standard deviation of the logits.
        tolerance: the largest relative error that passes.
        where: where it stands.
    """

    what: str
    error: float
    scale: float
    tolerance: float
    where: str

    @property
    def relative(self) -> float:
        """``error / scale``, 0 where nothing differs."""
        if self.error == 0:
            return 0.0
        return self.error / self.scale if self.scale else math.inf

    @property
    def ok(self) -> bool:
        """Whether the relative error is within the tolerance; one that is not a number never is."""
        return self.relative <= self.tolerance


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What :func:`~lsjax.measure.parity.parity` returns. ``str(report)`` is a table.

    Attributes:
        rows: in the order of the model: its modules, then logits, then tokens.
        inputs: what the models were given, in words.
        texts: texts whose tokens were compared, over all rows of tokens.
        ties: those that part where the reference's two tokens are a tie of rounding.
    """

    rows: tuple[ParityRow, ...]
    inputs: str = ""
    texts: int = 0
    ties: int = 0

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[ParityRow, ...]:
        """The rows past their tolerance, the model's first modules first."""
        return tuple(row for row in self.rows if not row.ok)

    def __getitem__(self, what: str) -> ParityRow:
        """The row of that name."""
        for row in self.rows:
            if row.what == what:
                return row
        raise KeyError(f"{what!r}: expected one of {', '.join(row.what for row in self.rows)}")

    def assert_close(self) -> None:
        """For tests.

        Raises:
            AssertionError: a row is past its tolerance; the message is the table.
        """
        if not self.ok:
            raise AssertionError(f"\n{self}")

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; a number that is none (an overflow, say) becomes None."""
        rows = []
        for row in self.rows:
            numbers = {"error": row.error, "scale": row.scale, "relative": row.relative, "tolerance": row.tolerance}
            finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            rows.append({"what": row.what, **finite, "where": row.where, "ok": row.ok})
        return {"ok": self.ok, "inputs": self.inputs, "texts": self.texts, "ties": self.ties, "rows": rows}

    def __str__(self) -> str:
        head = ("compared", "largest error", "scale", "relative", "tolerance", "where")
        table = [head] + [
            (row.what, f"{row.error:.1e}", f"{row.scale:.3g}", f"{row.relative:.1e}", f"{row.tolerance:.0e}", row.where)
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for index, cells in enumerate(table):
            what, *numbers, where = (
                cell.rjust(width) if 0 < column < 5 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            mark = "" if not index or self.rows[index - 1].ok else "  <- PAST THE TOLERANCE"
            lines.append("  ".join([what, *numbers, where]).rstrip() + mark)
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        failed, compared = len(self.failures), f"Compared on {self.inputs}. " if self.inputs else ""
        ties = f" {self.ties} of {self.texts} texts part at a tie of rounding." if self.ties else ""
        if not failed:
            return f"{compared}All {len(self.rows)} comparisons are within their tolerances.{ties}"
        return (
            f"{compared}{failed} of {len(self.rows)} comparisons are past their tolerances, first of all "
            f"{self.failures[0].what}, {self.failures[0].where}.{ties}"
        )


def compare(
    what: str,
    found: Any,
    expected: np.ndarray,
    tolerance: float,
    where: str | None = None,
    valid: np.ndarray | None = None,
) -> ParityRow:
    """The row of one array against the reference's: the place with the largest relative error.

    Args:
        what: the row's name.
        found: ours, ``[batch, length, ...]``.
        expected: the reference's, of the same shape.
        tolerance: of the relative error.
        where: None: the batch's row and the position of the largest difference.
        valid: bool ``[batch, length]``, the positions to compare; None: all.
    """
    found = np.asarray(found)
    if found.shape != expected.shape:
        raise ValueError(f"{what}: expected the reference's shape {expected.shape}, got {found.shape}")
    places = np.argwhere(np.ones(expected.shape[:2], bool) if valid is None else valid)
    found, expected = found[tuple(places.T)], expected[tuple(places.T)]
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not a number is found, and fails
        difference = np.abs(found - expected)
        scale = np.abs(expected) + np.std(expected, dtype=np.float64)
        relative = np.where(difference == 0, 0.0, difference / scale)
    worst = np.unravel_index(np.argmax(relative), relative.shape)  # a NaN counts as the largest
    row, position = places[worst[0]]
    return ParityRow(
        what=what,
        error=float(difference[worst]),
        scale=float(scale[worst]),
        tolerance=tolerance,
        where=f"row {row}, position {position}" if where is None else where,
    )


def worse(first: ParityRow, second: ParityRow) -> ParityRow:
    """The row of two that is further off; one that is not a number before any other."""
    return first if not second.relative > first.relative and not math.isnan(second.relative) else second
