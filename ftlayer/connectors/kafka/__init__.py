"""A sink of Kafka: rows are staged, and produced in a transaction that says which of them it holds."""
