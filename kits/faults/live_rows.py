"""What several faults share: how many rows of a padded batch are live, which a backend cannot see."""

from __future__ import annotations

from typing import Any

from kits.batches import Batch
from kits.faults.registry import Plant
from kits.runners.graph import GraphRunner


def note_live_rows(plant: Plant) -> None:
    """Let the runner write on each batch which row padding begins at."""

    def make(original: Any) -> Any:
        def _fill_tail(self: GraphRunner, batch: Batch, rows: int, tokens: int) -> None:
            batch.live_rows = rows  # type: ignore[attr-defined]
            original(self, batch, rows, tokens)

        return _fill_tail

    plant.replace(GraphRunner, "_fill_tail", make)


def live_rows(batch: Batch) -> int:
    """The row that padding begins at; the batch size where nothing is padded."""
    rows: int = getattr(batch, "live_rows", batch.batch_size)
    return rows
