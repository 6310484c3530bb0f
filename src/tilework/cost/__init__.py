"""Owns predicted durations: profile tables, interpolation between profiled shapes, correction by measurements.

Knows nothing of queues, policies or devices' states.
"""
