"""Commands that compute something again and compare."""
