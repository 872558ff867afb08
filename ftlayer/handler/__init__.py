"""What sits in a task and talks to the vertex: persisting, anchoring, XORing, failing."""
