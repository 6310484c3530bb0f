"""Owns how the frames of a clip become a file, and pictures of that. Knows no model, and of requests their format."""
