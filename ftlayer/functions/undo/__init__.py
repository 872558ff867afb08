"""Changes of state that can be taken back: a chain takes a record whole or not at all."""
