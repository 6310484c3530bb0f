"""Owns what makes a folder or a file this user's alone, and how one is opened without following a link.

Knows nothing of what lies there.
"""
