"""Owns the models of a worker, and which of their weights and LoRAs lie on its device."""
