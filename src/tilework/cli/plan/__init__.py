"""Owns the question, the searches and the answer of `tilework plan`. Needs no torch."""
