"""Keyed state as pieces of a checkpoint: written at a freeze or all the time, and read again."""
