"""Owns the files of the event log: segments, their names, their bound, and reading them in order.

Must not know: the meaning of a line (`control.log`).
"""
