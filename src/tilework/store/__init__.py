"""Owns results until their readers have fetched them or their time is up, and the journal of accepted calls, with the
pictures that these were given.

Knows nothing of how a result was made, nor what a call says.
"""
