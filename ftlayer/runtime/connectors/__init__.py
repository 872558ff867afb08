"""Sources read and sinks written in a slot: Python Data Sources, iterables, callbacks, functions."""
