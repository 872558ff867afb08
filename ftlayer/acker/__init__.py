"""The acker: which roots are pending, the XOR of what is owed for each, and when they expire.

Expiry is the rotating hash map: `RotatingHashMap` and `ExpirySchedule` say when a map's turn comes, and the table that
production runs on (`segmented_table`) keeps one segment for each.
"""

from .exact import ExactTracker, Explanation
from .rotating_map import RotatingHashMap
from .schedule import ExpirySchedule
from .segmented_table import MAX_STAMP, NEVER
from .table import AckerTable, warm_up
from .tracker import IdLists, Roots, Tracker, fold_ids

__all__ = [
    "MAX_STAMP",
    "NEVER",
    "AckerTable",
    "ExactTracker",
    "ExpirySchedule",
    "Explanation",
    "IdLists",
    "Roots",
    "RotatingHashMap",
    "Tracker",
    "fold_ids",
    "warm_up",
]
