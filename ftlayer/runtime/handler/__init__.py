"""The part of a task that talks to the vertex, behind one interface: `FTHandler` and `NonFTHandler`."""
