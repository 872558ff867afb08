"""Orders on their way from a source to a sink; `python -m my_project` runs it."""
