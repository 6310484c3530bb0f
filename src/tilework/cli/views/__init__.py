"""Owns what commands print and draw."""
