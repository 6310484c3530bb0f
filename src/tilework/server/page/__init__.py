"""Owns the page at `/`: its files, as `web/` builds them, and how they are sent.

They hold no data of the server; what the page shows it asks for, with the key of its user. Must not know calls.
"""
