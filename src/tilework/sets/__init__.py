"""Owns what several servers know of each other: the registry, refusals with another address, nodes between sets.

A *set* is one Tilework server with its nodes. Knows no engine, no worker and no HTTP server: what it says of a set, and
what an agent does, come in as functions.
"""
