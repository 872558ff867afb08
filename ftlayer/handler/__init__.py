"""What sits in a task and talks to the vertex, behind one interface: `FTHandler` and `NonFTHandler`."""
