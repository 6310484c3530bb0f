"""Owns workflows: what a user writes, the graph that it becomes, and the family that runs that.

Knows no kind of pipeline: each is a family of its own.
"""
