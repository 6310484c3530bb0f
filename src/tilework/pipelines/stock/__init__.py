"""Owns the family of any pipeline of diffusers: its stock call, interrupted wherever it calls a component.

Names no model: what differs from model to model is read from signatures, configurations and the calls themselves.
"""
