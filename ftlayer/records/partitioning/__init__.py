"""Partitioners, which give every record its channels, and their replay twins."""
