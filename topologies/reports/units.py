"""Numbers with their units, and tables of them, for people."""

from collections.abc import Sequence


def bytes_text(number: float) -> str:
    """Return a number of bytes with its unit, in powers of 1000; small numbers, such as of models, without one.

    Examples
    --------
    >>> bytes_text(1.5), bytes_text(100e6), bytes_text(2.5e9)
    ('1.5', '100 MB', '2.5 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"


def seconds_text(seconds: float) -> str:
    """Return a time with its unit.

    Examples
    --------
    >>> seconds_text(0.0325), seconds_text(12.5), seconds_text(4e-5)
    ('32.5 ms', '12.5 s', '40 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return rows of cells as lines; ``sides`` says of each column whether it is at the left, "<", or right, ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)) for row in rows
    ]
