"""Owns the model families: one thin adapter per diffusers pipeline class, how a group shares a step, and loading.

Knows nothing of jobs, queues or processes.
"""

import logging

# Libraries that quantise say at each import what they could do better, also where nothing is quantised.
for _name in ("bitsandbytes", "diffusers.quantizers.torchao", "torch.utils._pytree", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
