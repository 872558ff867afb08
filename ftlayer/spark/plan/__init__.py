"""What a user asked for: the source, the steps, where the rows go; and what is checked of it."""
