"""Owns comparisons of policies: what is compared on, the figures of one run, what was run before, means and intervals.

It simulates with the real controller. Of tables for people, pictures and the command line it knows nothing.
"""
