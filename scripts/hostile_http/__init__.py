"""Hostile HTTP requests for a running server: bodies, chunks, headers and misbehaving clients."""
