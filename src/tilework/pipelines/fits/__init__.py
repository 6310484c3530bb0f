"""Owns the plan of a model's memory: what goes where, what is left, and what would fit, before anything is loaded.

It reads configurations and the headers of weights. It must not know the device: its memory comes in as a number.
"""
