"""Owns what is there before a worker serves: what it is forked with, where it begins, and when it must begin anew.

Imports nothing by itself: the process that starts workers imports `entry`, and has no torch.
"""
