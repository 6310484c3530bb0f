"""Owns messages between processes, how the members of a group meet, and their collectives, which need no world.

Knows no jobs, models or policies; which groups there are, and when they end, is decided by the runtime.
"""
