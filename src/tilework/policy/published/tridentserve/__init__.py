"""Owns the TridentServe policy."""
