"""Which Java Spark runs on."""
