"""The same jobs in other systems, each a program of its own."""
