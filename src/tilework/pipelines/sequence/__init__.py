"""Owns which transformers of diffusers a group can share along the sequence: one row of data for each, and its hooks.

Knows nothing of families and pipelines.
"""

from tilework.pipelines.sequence.hooking import share
from tilework.pipelines.sequence.plan import Gather, Joint, SequencePlan, Split
from tilework.pipelines.sequence.rows import SEQUENCES

__all__ = ["SEQUENCES", "Gather", "Joint", "SequencePlan", "Split", "share"]
