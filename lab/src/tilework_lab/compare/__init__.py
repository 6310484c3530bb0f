"""Owns comparisons of policies: what is compared on, the figures of one run, what was run before, means and intervals.

It simulates with the real controller. It knows nothing of tables for people, charts and the command line.
"""
