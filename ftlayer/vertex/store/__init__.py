"""Where the vertex keeps its records: transactions over tables of byte keys."""

from ftlayer.vertex.store.key_value import INTAKE_SHARE as INTAKE_SHARE
from ftlayer.vertex.store.key_value import TABLES as TABLES
from ftlayer.vertex.store.key_value import KeyValueStore as KeyValueStore
from ftlayer.vertex.store.key_value import ReadTransaction as ReadTransaction
from ftlayer.vertex.store.key_value import WriteTransaction as WriteTransaction
from ftlayer.vertex.store.lmdb_store import Durability as Durability
from ftlayer.vertex.store.lmdb_store import LmdbStore as LmdbStore
from ftlayer.vertex.store.memory import MemoryStore as MemoryStore
