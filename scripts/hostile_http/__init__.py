"""Hostile HTTP for a running server: bodies, chunkings, headers, clients that misbehave."""
