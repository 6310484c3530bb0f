"""Owns the TetriServe policy."""
