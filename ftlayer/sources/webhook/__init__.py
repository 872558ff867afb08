"""Requests of other systems as a source: a web server in the slot, which answers what is durable."""
