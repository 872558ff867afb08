"""Record-level fault tolerance for PySpark streams."""
