"""Owns the contents of a model's files: which of them count, and digests of them.

Imports no torch, and knows nothing of nodes.
"""
