"""Owns clips out of their decoders: part by part, tile by tile, and what memory that takes.

It must not know requests, stages or stock calls.
"""
