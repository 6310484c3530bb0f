"""Owns what several servers know of each other: the registry, refusals with another address, nodes between sets.

A *set* is one Tilework server with its nodes. This package knows no engine, no worker and no HTTP server: it gets the
state of a set and the actions of an agent as functions.
"""
