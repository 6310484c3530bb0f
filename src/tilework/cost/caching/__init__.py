"""What caches save, as costs. Knows rows of cost tables; knows nothing of how a cache works."""
