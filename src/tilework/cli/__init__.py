"""Owns the command line: parsing, progress bars, tables. Every command is a thin call into another package."""
