"""Expiry: the hash table with buckets, the rotating map, and the schedule of rotations."""

from .rotating_map import RotatingHashMap
from .schedule import ExpirySchedule
from .segmented_table import MAX_STAMP, NEVER

__all__ = ["MAX_STAMP", "NEVER", "ExpirySchedule", "RotatingHashMap"]
