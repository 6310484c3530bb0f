"""Owns how the members of a group meet and what they say to each other: collectives that need no world.

Knows no jobs, models or policies; which groups there are, and when they end, is decided by the runtime.
"""
