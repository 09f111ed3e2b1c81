"""Drafts: tokens that may come next, guessed for less than the model takes to say.

Drafters propose. The scheduler plans what is left of a step for drafts, the runner computes them
with everything else, and the engine accepts those that the model's own draws confirm.
"""

from pyengine.speculation.drafter import ComputingDrafter, Context, Draft, Drafter
from pyengine.speculation.ngram import NgramDrafter
from pyengine.speculation.policy import Curve, EveryDraft, PayingDrafts, Policy, StepCosts, StepSize
from pyengine.speculation.speculator import Speculator
from pyengine.speculation.suffix import SuffixDrafter

__all__ = [
    "ComputingDrafter",
    "Context",
    "Curve",
    "Draft",
    "Drafter",
    "EveryDraft",
    "NgramDrafter",
    "PayingDrafts",
    "Policy",
    "Speculator",
    "StepCosts",
    "StepSize",
    "SuffixDrafter",
]
