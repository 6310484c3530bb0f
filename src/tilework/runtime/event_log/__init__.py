"""Owns the files of the event log: segments, their names, their bound, and reading them in order.

Must not know: what a line says (`control.log`).
"""
