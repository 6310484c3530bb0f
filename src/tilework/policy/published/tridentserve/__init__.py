"""Owns the TridentServe policy: when placements change, what is dispatched, and where its stages run."""
