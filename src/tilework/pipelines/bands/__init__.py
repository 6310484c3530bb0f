"""Owns a decode that ranks share: which rank has which rows, what crosses their edges, and which decoders are known.

It must not know requests, stages or stock calls.
"""
