"""A user's functions, run over Arrow batches in a Python worker."""
