"""Owns messages between processes, the forming of groups, and the collectives of their members, which need no world.

Knows no jobs, models or policies; the runtime decides which groups there are, and when they end.
"""
