"""Owns the benchmarks: what is measured, how often, and how a result is shown; one theme per file in `cases`.

Drives Tilework from outside, through its commands and public modules; nothing in `src/` knows of it.
"""
