"""Takes fewer items so that the choice follows from the items themselves: rows added elsewhere move nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from ..tasks.base import Item


def smallest_hashes(items: Sequence[Item], size: int | None, seed: int) -> list[Item]:
    """Return the items with the smallest hashes of seed and prompt, in the order of the hashes.

    Args:
        items: the items.
        size: how many at most; None for all.
        seed: decides which, and the order.
    """
    ordered = sorted(items, key=lambda item: (_hash(item, seed), item.dimension))
    return ordered if size is None else ordered[:size]


def stratified(items: Sequence[Item], size: int, seed: int, stratum: Callable[[Item], str]) -> list[Item]:
    """Return ``size`` items, each stratum in proportion to its size (largest remainders first), in the order of hashes.

    Args:
        items: the items; all are returned when there are no more than ``size``.
        size: how many.
        seed: decides which.
        stratum: names an item's stratum.
    """
    if size >= len(items):
        return smallest_hashes(items, None, seed)
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(stratum(item), []).append(item)
    shares = {name: size * len(group) / len(items) for name, group in groups.items()}
    counts = {name: int(share) for name, share in shares.items()}
    left = size - sum(counts.values())
    for name in sorted(shares, key=lambda name: (counts[name] - shares[name], name))[:left]:
        counts[name] += 1
    chosen = [item for name, group in groups.items() for item in smallest_hashes(group, counts[name], seed)]
    return smallest_hashes(chosen, None, seed)


def _hash(item: Item, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{item.prompt}".encode("utf-8", "surrogatepass")).digest()
