"""Owns the back end of a ring on one node: memory that its processes share, and whose processes the kernel ends.

Knows nothing of the protocol's steps.
"""
