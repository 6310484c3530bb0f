"""Owns the commands about caches: `tilework quality`, and what `tilework profile --cache` and `--train-cache` do.

It must not know how patches are kept.
"""
