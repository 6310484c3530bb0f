"""Owns what a request looks like before it is done: the latents that a model believes in, and their decoding in small.

Knows samplers and tensors, no family.
"""
