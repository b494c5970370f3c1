"""Finds the graphics card that a CUDA device number means, among those that NVML lists; imports neither torch nor NVML.

NVML numbers all cards of a machine by PCI address. CUDA numbers those that ``CUDA_VISIBLE_DEVICES`` leaves, by speed
unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, and shows of a partitioned (MIG) card one instance at a time.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ASSUMED_ORDER = (
    "assumed: CUDA is not started yet, and numbers cards by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML's order by "
    "PCI address was taken"
)
"""What `Card.chosen_by` says when a number alone cannot tell which of several cards is meant."""


class CardUnavailableError(Exception):
    """No card can be read; the message is the reason, in words for a person."""


@dataclass(frozen=True)
class Card:
    """A card, or a MIG instance of one, as NVML knows it.

    Attributes:
        handle: NVML's handle.
        uuid: ``"GPU-..."``, or ``"MIG-..."`` of an instance; empty when NVML does not tell.
        parent: UUID of the card that an instance is part of; empty for a whole card.
        instance: GPU instance and compute instance of a MIG instance; None for a whole card.
        chosen_by: how it was found: ``"uuid"``, ``"pci address"``, ``"CUDA_VISIBLE_DEVICES"``, ``"only card"``,
            ``"CUDA_DEVICE_ORDER"``, or a sentence that begins with ``"assumed"``.
    """

    handle: Any
    uuid: str
    parent: str = ""
    instance: tuple[int, int] | None = None
    chosen_by: str = ""


def cuda_card(nvml: Any, index: int) -> Card:
    """Return the card that ``cuda:index`` means in this process.

    Once torch has started CUDA it is asked for the device's UUID, else its PCI address; before, the environment
    variables decide as CUDA reads them.

    Args:
        nvml: the `pynvml` module, initialised.
        index: CUDA device number, from 0.

    Raises:
        CardUnavailableError: there is no such card; the message says why.
    """
    cards = _all_cards(nvml)
    properties = _torch_properties(index)
    if properties is not None:
        found = _by_properties(nvml, cards, properties)
        if found is not None:
            return found
    visible, how = _visible(nvml, cards)
    if not 0 <= index < len(visible):
        raise CardUnavailableError(
            f"cuda:{index} is not visible: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} leaves "
            f"{len(visible)} of {len(cards)} cards"
        )
    return _chosen(visible[index], how)


def visible_cards(value: str, cards: Sequence[Card], instances: Sequence[Card]) -> list[Card]:
    """Return the cards that a value of ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    Entries are numbers, UUIDs or unambiguous beginnings of them, or MIG instances (``MIG-...``, or the older
    ``MIG-GPU-UUID/GPU instance/compute instance``). The first that is negative, unknown, ambiguous or of another kind
    than the one before ends the list; a card named twice leaves none.

    Args:
        value: the variable's value.
        cards: all cards, in the order numbers count them.
        instances: all MIG instances.
    """
    entries: list[str | int] = []
    kinds = set()
    for entry in (part.strip() for part in value.split(",")):
        kind = entry[:4] if entry.startswith(("GPU-", "MIG-")) else "number"
        kinds.add(kind)
        number = _leading_integer(entry) if kind == "number" else 0
        if len(kinds) > 1 or number < 0:
            break
        read = number if kind == "number" else entry
        if read in entries:
            return []
        entries.append(read)
    chosen: list[Card] = []
    for read in entries:
        found = _named(read, cards, instances)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _leading_integer(text: str) -> int:
    """Return the integer that a text begins with, as C reads it; -1 when there is none."""
    match = re.match(r"[+-]?\d+", text)
    return int(match.group()) if match else -1


def _named(entry: str | int, cards: Sequence[Card], instances: Sequence[Card]) -> Card | None:
    if isinstance(entry, int):
        return cards[entry] if entry < len(cards) else None
    older = re.fullmatch(r"MIG-(GPU-[^/]*)/(\d+)/(\d+)", entry)
    if older is not None:
        pair = int(older.group(2)), int(older.group(3))
        fitting = [card for card in instances if card.parent.startswith(older.group(1)) and card.instance == pair]
    else:
        fitting = [card for card in (*cards, *instances) if card.uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _visible(nvml: Any, cards: Sequence[Card]) -> tuple[list[Card], str]:
    """Return the cards CUDA would number, in its order as far as the environment tells it, and what told it."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    instances = {card.uuid: _instances(nvml, card) for card in cards}
    flat = [instance for listed in instances.values() for instance in listed]
    visible = list(cards) if value is None else visible_cards(value, cards, flat)
    # of a partitioned card that is named as a whole, CUDA shows the first instance
    visible = [next(iter(instances.get(card.uuid, ())), card) if card.instance is None else card for card in visible]
    if value is not None and value.strip().startswith(("GPU-", "MIG-")):
        return visible, "CUDA_VISIBLE_DEVICES"
    if len(cards) == 1:
        return visible, "only card"
    by_address = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible, "CUDA_DEVICE_ORDER" if by_address else ASSUMED_ORDER


def _all_cards(nvml: Any) -> list[Card]:
    cards = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
        except Exception as error:  # one card that may not be opened hides no other
            cards.append(Card(_Closed(f"{type(error).__name__}: {error}"), ""))
        else:
            cards.append(Card(handle, _uuid(nvml, handle)))
    return cards


@dataclass(frozen=True)
class _Closed:
    """Stands for the handle of a card that NVML lists and does not open."""

    reason: str


def _chosen(card: Card, how: str) -> Card:
    if isinstance(card.handle, _Closed):
        raise CardUnavailableError(f"NVML does not open the card ({card.handle.reason})")
    return Card(card.handle, card.uuid, card.parent, card.instance, how)


def _uuid(nvml: Any, handle: Any) -> str:
    try:
        uuid = nvml.nvmlDeviceGetUUID(handle)
    except Exception:  # a card without a name is still a card: it is found by its place
        return ""
    if isinstance(uuid, bytes):
        return uuid.decode(errors="replace")
    return uuid if isinstance(uuid, str) else ""


def _instances(nvml: Any, card: Card) -> list[Card]:
    """Return the MIG instances of a card, none for one that is whole or of a kind that cannot be partitioned."""
    found = []
    try:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, number)
            except Exception:  # slots may be empty
                continue
            pair = int(nvml.nvmlDeviceGetGpuInstanceId(handle)), int(nvml.nvmlDeviceGetComputeInstanceId(handle))
            found.append(Card(handle, _uuid(nvml, handle), card.uuid, pair))
    except Exception:  # how NVML says that a card cannot be partitioned
        return []
    return found


def _torch_properties(index: int) -> Any | None:
    """Return torch's properties of a CUDA device when torch has started CUDA in this process; never starts it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return torch.cuda.get_device_properties(index)
    except Exception:  # a card that was lost
        return None


def _by_properties(nvml: Any, cards: Sequence[Card], properties: Any) -> Card | None:
    """Return the card with a CUDA device's UUID or PCI address; None where neither points at one card."""
    uuid = str(getattr(properties, "uuid", "") or "")
    if uuid:
        for card in cards:
            instances = _instances(nvml, card)
            for instance in instances:
                if instance.uuid == f"MIG-{uuid}":
                    return _chosen(instance, "uuid")
            if card.uuid == f"GPU-{uuid}" and not instances:  # of a partitioned card it does not say which instance
                return _chosen(card, "uuid")
    address = tuple(getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if None not in address:
        for card in cards:
            if _pci_address(nvml, card) == address and not _instances(nvml, card):
                return _chosen(card, "pci address")
    return None


def _pci_address(nvml: Any, card: Card) -> tuple[int, int, int] | None:
    try:
        info = nvml.nvmlDeviceGetPciInfo(card.handle)
        return int(info.domain), int(info.bus), int(info.device)
    except Exception:  # then it is not matched by address, and the caller says what it assumes
        return None
