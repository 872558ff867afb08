"""The acker: which roots are pending, and the XOR of what is owed for each."""

from .exact import ExactTracker, Explanation
from .table import AckerTable, warm_up
from .tracker import IdLists, Roots, Tracker, fold_ids

__all__ = ["AckerTable", "ExactTracker", "Explanation", "IdLists", "Roots", "Tracker", "fold_ids", "warm_up"]
