"""Where the vertex keeps its records: transactions over tables of byte keys."""

from ftlayer.store.kept import INTAKE_SHARE as INTAKE_SHARE
from ftlayer.store.kept import TABLES as TABLES
from ftlayer.store.kept import KeyValueStore as KeyValueStore
from ftlayer.store.kept import ReadTransaction as ReadTransaction
from ftlayer.store.kept import WriteTransaction as WriteTransaction
from ftlayer.store.lmdb_store import Durability as Durability
from ftlayer.store.lmdb_store import LmdbStore as LmdbStore
from ftlayer.store.memory import MemoryStore as MemoryStore
