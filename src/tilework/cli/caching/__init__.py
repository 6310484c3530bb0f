"""Owns the commands about caches: `tilework quality`, and what `tilework profile --cache` does.

It must not know how patches are kept.
"""
