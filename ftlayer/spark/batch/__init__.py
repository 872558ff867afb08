"""One micro-batch on the driver: its stages are run, its rows go to the sink, what failed is found again."""
