"""Owns calls: parsing, admission to the engine, progress, end, records and their journal.

Must not know HTTP: no status codes, headers, connections or routes. Errors name field, value and remedy.
"""
