"""Barrier mode: the whole job is snapshotted together, and goes back together."""
