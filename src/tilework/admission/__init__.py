"""Owns admission: when a new request would finish, whether it may come in, and the reservations of promised requests."""
