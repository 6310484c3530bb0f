"""Costs with caches: how much time they save. Reads rows of cost tables; knows nothing of how a cache works."""
