"""Owns what the page at `/` shows of a running server: what devices do, what waits, what was on time.

The engine feeds it as things happen; it is read at most twice a second, however many watch. Must not know routes or
calls.
"""
