"""A pipeline as a graph of stages, and the position of a request on its way through it. Names no stage."""
