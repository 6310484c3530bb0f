"""Owns the links between workers of a node: the communicator that they form, and the ids of groups."""
