"""Owns the yardstick of `tilework bound`: how many requests could be on time for a scheduler that knows the future.

Knows no policy and no controller.
"""
