"""Sets of whole numbers as ranges [begin, end): what an event stores instead of thousands of neighbours.

>>> as_ranges({7, 4, 5, 6, 9})
[(4, 8), (9, 10)]
>>> sorted(from_ranges([(4, 8), (9, 10)]))
[4, 5, 6, 7, 9]
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = list[tuple[int, int]]


def as_ranges(numbers: Iterable[int]) -> Ranges:
    """Ascending, disjoint and not touching."""
    ranges: Ranges = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {number for begin, end in ranges for number in range(begin, end)}
