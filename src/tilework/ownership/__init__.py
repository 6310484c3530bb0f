"""Owns what makes a folder or a file private to this user, and how to open one without following a link.

Knows nothing of what is stored there.
"""
