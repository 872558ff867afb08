"""Barrier mode in a task: chains and sources whose state is in checkpoints."""
