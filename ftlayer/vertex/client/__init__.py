"""Clients of the vertex: single calls, and pipelines of numbered ones."""
