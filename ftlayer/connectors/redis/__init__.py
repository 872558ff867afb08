"""A stream of Redis as a source."""
