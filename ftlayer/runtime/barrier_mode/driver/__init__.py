"""Barrier mode in the driver: checkpoints, commits, and what a restored job begins with."""
