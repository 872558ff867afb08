"""Files that grow, and are rotated, as a source."""
