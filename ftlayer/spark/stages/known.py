"""What is known of the rows of a stage beside their columns: of those that the vertex delivered, their tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.functions.chains.chain import ChainResult
from ftlayer.functions.current import UNTRACKED, Tries
from ftlayer.records.tries import FIRST_TRY
from ftlayer.spark.stages.isolate import run_isolated
from ftlayer.spark.stages.pages import U64

_PLACE = "_ft_place"


@dataclass(frozen=True)
class TriedRoots:
    """Origins and tries by root, which ascend: what a stage behind the first knows of delivered rows."""

    roots: U64
    origins: U64
    tries: U64

    @classmethod
    def of(cls, roots: U64, origins: U64, tries: U64) -> TriedRoots:
        order = np.argsort(roots)
        return cls(roots[order], origins[order], tries[order])

    def known(self, roots: U64) -> Tries:
        """Return what is known of rows with these roots; one that was not delivered is its own origin."""
        if not len(self.roots):
            return Tries(roots, None)
        places = np.minimum(np.searchsorted(self.roots, roots), len(self.roots) - 1)
        found = self.roots[places] == roots
        origins = np.where(found, self.origins[places], roots)
        return Tries(origins, np.where(found, self.tries[places], np.uint64(FIRST_TRY)))


NOTHING_TRIED = TriedRoots(*(np.zeros(0, np.uint64) for _ in range(3)))


def known_of_source(roots: U64, delivered: npt.NDArray[np.bool_], marks: npt.NDArray[np.void]) -> Tries:
    """Return what is known of the rows of a first stage; ``marks`` are those of the delivered ones."""
    origins, tries = roots.copy(), np.full(len(roots), FIRST_TRY, np.uint64)
    origins[delivered], tries[delivered] = marks["origin"], marks["tries"]
    return Tries(origins, tries)


def isolated(
    rows: pa.RecordBatch, known: Tries, run: Callable[[pa.RecordBatch, Tries], ChainResult]
) -> ChainResult:
    """Run rows in child processes (`run_isolated`), whose parts of them take along what is known."""
    if known is UNTRACKED:
        return run_isolated(rows, lambda part: run(part, UNTRACKED))
    placed = rows.append_column(_PLACE, pa.array(np.arange(rows.num_rows)))

    def run_part(part: pa.RecordBatch) -> ChainResult:
        places = part.column(_PLACE).to_numpy()
        return run(part.select(rows.schema.names), known.take(places))

    return run_isolated(placed, run_part)
