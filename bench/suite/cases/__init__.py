"""Owns the themes, one per file: what is measured and against which goal.

A case knows nothing of how its finding is shown or kept.
"""
