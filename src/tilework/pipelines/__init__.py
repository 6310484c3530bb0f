"""Owns the model families: one thin adapter per diffusers pipeline class, how a group shares a step, and loading.

Knows nothing of jobs, queues or processes.
"""
