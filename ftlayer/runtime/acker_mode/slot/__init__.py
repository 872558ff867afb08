"""Acker mode in a slot: its way to the vertex."""
