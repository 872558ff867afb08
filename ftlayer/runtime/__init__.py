"""The runtime of a JobGraph on Spark: slots, their tasks and channels, and the coordinator."""
