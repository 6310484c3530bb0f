"""Owns the default policy, which simulates what would happen next and acts on the first moment of it."""
