"""Owns which blocks of a denoiser can be computed for some patches only, and for which requests.

It must not know what is kept, or how that is decided: the layout does (`core.packing.Layout.run_block`).
"""
