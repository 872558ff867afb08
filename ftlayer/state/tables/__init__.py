"""Keyed state in memory: tables in layers, key groups, timers, and how much memory they take up."""
