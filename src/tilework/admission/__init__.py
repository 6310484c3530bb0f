"""Owns admission: acceptance of requests, predictions of their ends, and reservations of promised requests."""
