"""Owns calls: from parsing over submission to their end, their records and their journal."""
