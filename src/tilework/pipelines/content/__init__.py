"""Owns what the files of a model hold: which of them count, and digests of them.

Imports no torch, and knows nothing of nodes.
"""
