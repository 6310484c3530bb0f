"""Owns admission: when a request would finish, whether it may come in, and what is reserved for promised ones."""
