"""Numbers in sentences."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
