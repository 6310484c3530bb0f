"""A quarter of an hour with a bare machine that has one card: what is installed, measured in which order, and kept.

These files import the standard library and the table of parts alone: they run where nothing is installed yet.
"""
