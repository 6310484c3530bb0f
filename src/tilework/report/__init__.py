"""Owns what people look at: tables, timelines, contact sheets.

Reads files and plain records; needs neither torch nor a server.
"""
