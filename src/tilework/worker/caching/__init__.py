"""Owns work on caches beside serving: images with and without a cache to compare, and the training of a predictor.

It must not know commands or files.
"""
