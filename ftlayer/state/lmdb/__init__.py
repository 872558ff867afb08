"""State larger than memory: what moves to LMDB below the tables, and how it lies there."""
