"""Owns the compression of a clip's frames into a file, and images of it. Knows no model, and only requests' format."""
