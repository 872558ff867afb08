"""The acker: which roots are pending, the XOR of what is owed for each, and when they expire.

Expiry is the rotating hash map: the table of pending roots is a `RotatingHashMap`, whose entries are in buckets by
their age, and `BucketRotation` says when a bucket's turn to expire has come.
"""

from .exact import ExactTracker as ExactTracker
from .rotating_map import NEVER as NEVER
from .rotating_map import IdLists as IdLists
from .rotating_map import Roots as Roots
from .rotating_map import RotatingHashMap as RotatingHashMap
from .rotating_map import fold_ids as fold_ids
from .rotation import BucketRotation as BucketRotation
from .rotation import BucketRotations as BucketRotations
from .table import AckerTable as AckerTable
from .table import warm_up as warm_up

Tracker = AckerTable | ExactTracker
