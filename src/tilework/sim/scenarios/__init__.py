"""Owns the scenarios of fuzzing, with faults and without, and the costs that are made up for them.

It knows no invariant and no controller beyond its configuration.
"""
