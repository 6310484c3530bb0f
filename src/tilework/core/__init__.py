"""Owns the vocabulary that all other packages use: requests, works, events, actions, wire messages, protocols.

Knows only the standard library; holds no state and makes no decision.
"""
