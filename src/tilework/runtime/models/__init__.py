"""Owns what the runtime does about models beside their works: measures them, and changes which are served."""
