"""Owns the page at `/`: its files, as `web/` builds them, and how they are sent.

They hold no data of the server: the page asks for what it shows, with the key of its user. Must not know calls.
"""
