"""Acker mode in a task: sources that persist, replays, and what is acknowledged when."""
