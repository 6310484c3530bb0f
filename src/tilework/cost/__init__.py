"""Owns predicted durations: profile tables and their database, interpolation, correction by measurements.

Knows nothing of queues, policies or devices' states.
"""
