"""What every Flight server and client here has in common: addresses, sockets, TLS, tokens, streams of frames."""
