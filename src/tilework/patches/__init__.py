"""Owns batches of pictures of several sizes: their layout as patches, and the operators that reach beyond a patch.

Knows tensors; nothing of model families, requests or steps.
"""
