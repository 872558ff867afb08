"""A wrapped query that runs: its start, its supervisor, its handle, its checkpoint, its end."""
