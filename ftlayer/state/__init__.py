"""Keyed state and timers of operators."""
