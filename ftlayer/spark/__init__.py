"""Structured Streaming: the doors to wrapped queries, and the protocol that takes each micro-batch through."""
