"""The vertex as a service: `client` for those who call it, `embedded` and `serve` for those who run it."""
