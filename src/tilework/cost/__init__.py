"""Owns predicted durations: cost tables and the database of profiles, interpolation, correction by measurements.

Knows nothing of queues, policies or the states of devices.
"""
