"""Owns the model families: one thin adapter per diffusers pipeline class, and loading from disk or hub.

Knows nothing of jobs, queues or processes.
"""
