"""The runtime of a JobGraph on Spark: slots, their tasks and channels, the coordinator, and the two modes."""
