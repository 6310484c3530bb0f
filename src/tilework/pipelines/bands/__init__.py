"""Owns a decode that the ranks of a group share: who has which rows, what crosses their edges, which decoders are known.

It must not know requests, stages or stock calls.
"""
