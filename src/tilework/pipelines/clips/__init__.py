"""Owns clips out of their decoders: part by part, tile by tile, and the memory that this takes.

It must not know requests, stages or stock calls.
"""
