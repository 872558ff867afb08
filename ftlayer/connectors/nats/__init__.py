"""A stream of NATS JetStream as a source."""
