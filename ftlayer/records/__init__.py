"""Record ids and their derivation, tracked Arrow batches and their codec, key selectors and key hash."""
