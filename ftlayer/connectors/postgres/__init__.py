"""PostgreSQL as a source: rows of a table as they come, and the changes of a table."""
