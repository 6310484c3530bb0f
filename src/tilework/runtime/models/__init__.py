"""Owns the runtime's handling of models beside their works: measures them, and changes which are served."""
