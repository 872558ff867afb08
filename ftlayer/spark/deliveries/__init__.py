"""Records that the vertex gives to a wrapped query: what waited for its replay, and what was ingested."""
