"""The driver's side of a running topology: its slots, losses and the end; splits of readers; what is told of a job."""
