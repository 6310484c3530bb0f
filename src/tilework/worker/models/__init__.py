"""Owns the models of a worker, and decides which of their weights and LoRAs are on its device."""
