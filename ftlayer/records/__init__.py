"""Record ids and their derivation, key selectors and Spark's key hash, Arrow IPC and columns read with care."""
