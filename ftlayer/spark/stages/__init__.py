"""A stage of a wrapped query: its steps, its run in Python workers, the pages that it leaves, and their verdict."""
