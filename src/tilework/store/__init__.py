"""Owns results until their readers have fetched them or their time is up.

Knows nothing of how a result was made.
"""
