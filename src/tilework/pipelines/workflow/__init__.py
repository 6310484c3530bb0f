"""Owns workflows: their definition by a user, the graph that it becomes, and the family that runs the graph.

Knows no kind of pipeline: each is a family of its own.
"""
