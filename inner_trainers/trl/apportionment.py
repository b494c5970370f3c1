"""Shares rows out among sources one after another, so that at any time each has had its share to within a row."""

from __future__ import annotations

from collections.abc import Mapping

_ROUNDING = 1e-9


class Apportionment:
    """Rows by share, what is left over carried to the next call.

    After every row, each source's count differs from its share of all rows by less than 1. The rule is that of
    Tijdeman (1980), "The chairman assignment problem": of the sources that are far enough behind, the one that would
    be a row behind first comes next. Shares that `change` keep what each source is owed.

    Args:
        shares: source -> share, summing to 1; those of 0 get no row.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._owed: dict[str, float] = {}  # before the shares now in force
        self._begin(shares)

    def change(self, shares: Mapping[str, float]) -> None:
        """Share later rows out otherwise; what a source without a share was owed goes to the others alike."""
        owed = {name: self._behind(name) for name in self._shares}
        self._begin(shares)
        dropped = sum(value for name, value in owed.items() if name not in self._shares)
        self._owed = {name: owed.get(name, 0.0) + dropped / len(self._shares) for name in self._shares}

    def _begin(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self._shares = {name: share / total for name, share in shares.items() if share > 0}
        self._given = dict.fromkeys(self._shares, 0)
        self._rows = 0

    def _behind(self, name: str) -> float:
        return self._owed.get(name, 0.0) + self._shares[name] * self._rows - self._given[name]

    def next(self, count: int) -> dict[str, int]:
        """Return how many of the next ``count`` rows each source gets."""
        shares, given = self._shares, self._given
        if len(shares) == 1:
            return dict.fromkeys(shares, count)  # owed to no one else
        slack = 1.0 / (2 * len(shares) - 2)
        before = dict(given)
        for _ in range(count):
            self._rows += 1
            chosen, earliest = max(shares, key=self._behind), float("inf")
            for name, share in shares.items():
                behind = self._behind(name)
                deadline = (1.0 - slack - behind) / share
                if behind >= slack - _ROUNDING and deadline < earliest:
                    chosen, earliest = name, deadline
            given[chosen] += 1
        return {name: given[name] - before[name] for name in shares}

    def undo(self, counts: Mapping[str, int]) -> None:
        """Take the rows of the last call back."""
        if len(self._shares) > 1:
            self._rows -= sum(counts.values())
            for name, count in counts.items():
                self._given[name] -= count
