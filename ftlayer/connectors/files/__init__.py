"""Files of a directory as a source: each is read once, in the order in which they were written."""
