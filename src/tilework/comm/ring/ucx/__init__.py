"""Owns the back end of a ring over UCX: memory that producers of other nodes write to through a network.

Knows nothing of the protocol's steps; they run over these verbs as over any.
"""
