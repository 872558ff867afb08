"""Barrier mode: barrier handlers, the checkpoint coordinator, checkpoint storage, savepoints. Names are Flink's."""
