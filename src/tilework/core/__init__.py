"""Owns the vocabulary that every other package speaks: requests, works, events, actions, wire messages, protocols.

Knows only the standard library; holds no state and makes no decision.
"""
