"""Owns what is HTTP and not ours: bodies, connections, errors, middleware, server-sent events."""
