"""Structured Streaming: wrapped sources, functions and sinks of a micro-batch query."""
