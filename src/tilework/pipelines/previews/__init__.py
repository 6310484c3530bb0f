"""Owns previews of a request: the clean latents that a model predicts between steps, and their decoding in small.

Knows samplers and tensors, no family.
"""
