"""Owns policies for more weights than devices hold: each device runs one request to its end, and they choose which."""
