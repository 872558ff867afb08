"""Client libraries of other systems, which come with extras: how each is imported, configured and opened."""
