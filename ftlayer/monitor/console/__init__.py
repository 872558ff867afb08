"""The console: web pages and a JSON API over what `ftlayer.monitor` says of jobs, vertices and records."""
