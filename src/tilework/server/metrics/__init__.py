"""Owns what Prometheus reads."""
