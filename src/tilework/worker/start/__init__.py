"""Owns what comes before a worker serves: the memory it is forked with, its entry point, and its restart if needed.

Imports nothing by itself: the process that starts workers imports `entry`, and has no torch.
"""
