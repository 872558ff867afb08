"""The JSON API, ``/api/v1``: all that the pages do, in the same fields; OpenAPI at ``/api/v1/openapi.json``."""
