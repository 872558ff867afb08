"""One subtask of a chain: events in, actions out. No I/O, no threads, no clock."""
