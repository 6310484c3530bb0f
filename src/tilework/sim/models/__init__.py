"""Models and LoRAs that come and go in a simulation: the changes, a catalog that makes them, and what fuzzing draws.

It knows no worker and no file: what is read here are cost tables.
"""
