"""Acker mode in the driver: what restarts, and which record ends the process that works on it."""
