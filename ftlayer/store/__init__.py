"""Where the vertex keeps its records: transactions over tables of byte keys."""

from ftlayer.store.kv import INTAKE_SHARE, TABLES, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.store.lmdb_store import Durability, LmdbStore
from ftlayer.store.memory import MemoryStore

__all__ = [
    "INTAKE_SHARE",
    "TABLES",
    "Durability",
    "KeyValueStore",
    "LmdbStore",
    "MemoryStore",
    "ReadTransaction",
    "WriteTransaction",
]
