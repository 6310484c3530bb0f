"""Owns what Prometheus reads: counters, gauges and histograms, fed by the engine as things happen.

Must not know routes or calls.
"""
