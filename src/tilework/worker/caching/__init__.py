"""Owns what is done about caches beside serving: pictures with and without one to compare, and training a predictor.

It must not know commands or files.
"""
