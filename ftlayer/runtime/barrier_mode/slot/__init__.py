"""Barrier mode in a slot: barriers, records in flight, snapshots."""
