"""The acker: which roots are pending, the XOR of what is owed for each, and when they expire.

Expiry is the rotating hash map: the table of pending roots is a `RotatingHashMap`, whose entries are in buckets by
their age, and `BucketRotation` says when a bucket's turn to expire has come.
"""

from .exact import ExactTracker, Explanation
from .rotating_map import NEVER, RotatingHashMap
from .rotation import BucketRotation, BucketRotations
from .table import AckerTable, warm_up
from .tracker import IdLists, Roots, Tracker, fold_ids

__all__ = [
    "NEVER",
    "AckerTable",
    "BucketRotation",
    "BucketRotations",
    "ExactTracker",
    "Explanation",
    "IdLists",
    "Roots",
    "RotatingHashMap",
    "Tracker",
    "fold_ids",
    "warm_up",
]
