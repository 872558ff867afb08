"""A queue of AMQP 0.9.1 as a source."""
