"""What the driver and its slots, and slots among themselves, say to each other, and how it travels."""
