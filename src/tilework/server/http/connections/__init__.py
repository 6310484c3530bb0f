"""Owns connections: how many there may be, which of them give way, and how slowly each may send and take.

Must not know what is asked for.
"""
