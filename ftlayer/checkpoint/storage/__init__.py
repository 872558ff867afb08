"""Where snapshots lie: driver memory, or any directory that fsspec reaches."""
