"""Owns what is known of classes of pipelines: which are served exactly, with what limits, and how many there are.

Reads signatures and the shipped record; it runs no model, and serves none.
"""
