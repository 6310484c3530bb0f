"""Owns admission: when a request would finish, whether it is accepted, and the reservations of promised requests."""
