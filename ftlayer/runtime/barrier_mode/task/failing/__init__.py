"""Records that fail in a chain of barrier mode: they wait for another attempt, or are dead letters."""
