"""Clips out of their decoders: part by part, tile by tile, and what memory that takes.

It knows the autoencoders of diffusers that make clips, and nothing of requests or stages.
"""
