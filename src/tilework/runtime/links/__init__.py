"""Which workers of a node can run in groups: the communicator that they form, and the ids of groups."""
