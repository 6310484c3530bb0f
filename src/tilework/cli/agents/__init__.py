"""Owns how the agents of one machine are started, and what shows that they are of one user."""
