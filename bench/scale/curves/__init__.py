"""The curves, a file each."""
