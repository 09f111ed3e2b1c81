"""The HTTP server, in this process."""
