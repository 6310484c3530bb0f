"""Owns the model families: one thin adapter per diffusers pipeline class, how a group shares a step, and loading.

Knows nothing of jobs, queues or processes.
"""

import logging

# Quantisation libraries advise at each import what they could do better, even if nothing is quantised.
for _name in ("bitsandbytes", "diffusers.quantizers.torchao", "torch.utils._pytree", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
