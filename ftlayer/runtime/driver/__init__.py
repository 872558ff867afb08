"""The driver's side of a running topology: registration, epochs, restarts, splits, progress."""
