"""Acker mode: records are tracked one by one at the vertex, and replayed."""
