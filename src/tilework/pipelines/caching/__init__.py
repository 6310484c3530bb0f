"""Owns which blocks of a denoiser can be computed for some patches only, and which requests that is done for.

It must not know what is kept, or how it is decided: that is the layout's (`core.packing.Layout.run_block`).
"""
