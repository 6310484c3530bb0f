"""Owns the policies that divide devices statically among buckets of requests: `bucketed`, and baselines of DDiT."""
