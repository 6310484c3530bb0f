"""Owns texts and JSON of clients: read in small steps, within bounds of size, number and depth.

Must not know HTTP, nor what a text means.
"""
