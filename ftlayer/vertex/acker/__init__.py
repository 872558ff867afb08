"""The acker: which roots are pending, the XOR of what is owed for each, and when they expire.

Expiry is the rotating hash map: the table of pending roots is a `RotatingHashMap`, whose entries are in buckets by
their age, and `BucketRotation` says when a bucket's turn to expire has come.
"""

from ftlayer.vertex.acker.exact import ExactTracker as ExactTracker
from ftlayer.vertex.acker.rotating_map import NEVER as NEVER
from ftlayer.vertex.acker.rotating_map import BucketRotation as BucketRotation
from ftlayer.vertex.acker.rotating_map import BucketRotations as BucketRotations
from ftlayer.vertex.acker.rotating_map import IdLists as IdLists
from ftlayer.vertex.acker.rotating_map import Roots as Roots
from ftlayer.vertex.acker.rotating_map import RotatingHashMap as RotatingHashMap
from ftlayer.vertex.acker.rotating_map import fold_ids as fold_ids
from ftlayer.vertex.acker.table import AckerTable as AckerTable
from ftlayer.vertex.acker.table import warm_up as warm_up

Tracker = AckerTable | ExactTracker
