"""Owns one thin adapter per class of diffusers pipelines."""
