"""What the Flight servers and clients of vertex, slots and driver have in common; it knows none of them."""
