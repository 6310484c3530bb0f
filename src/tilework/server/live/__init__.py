"""Owns what the page at `/` shows of a running server: what devices do, what waits, what was on time.

Fed by the engine as things happen, and read at most twice a second, however many read. Must not know routes or calls.
"""
