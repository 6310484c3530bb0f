"""Owns the JSON of requests and answers: names, types, bounds and descriptions of their fields.

Must not know where a value comes from or what is done with it.
"""
