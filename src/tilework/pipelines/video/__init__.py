"""Owns how the frames of a clip become a file. Knows no model, and nothing of requests but their format."""
