"""Owns what turns a client's JSON into a checked call: what to draw, by when and on which terms."""
