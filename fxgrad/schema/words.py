"""The words that have fixed meanings: statistics levels, norms, front ends, blind-spot reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Level = Literal["norm", "full", "histogram"]
SiteKind = Literal["node", "edge"]
NormWord = Literal["l2_norm", "rms", "max_abs"]
FrontEnd = Literal["symbolic", "eager", "dynamo"]
Reason = Literal[
    "integer",
    "no_grad_required",
    "no_grad_region",
    "reentrant_checkpoint",
    "detached",
    "frozen",
    "output_unused",
    "not_reached",
    "inside_leaf",
    "changed_through_view",
    "no_probe",
    "statistic_failed",
    "not_reduced",
    "used_outside",
    "merged_use",
    "untraceable_use",
]

#: What each blind-spot reason means, in a sentence that a report can print.
REASONS: Mapping[Reason, str] = {
    "integer": "the value is an integer or boolean tensor, which has no gradient",
    "no_grad_required": "nothing that the value depends on requires a gradient",
    "no_grad_region": "the value was computed where gradients were switched off",
    "reentrant_checkpoint": "the value comes from a reentrant checkpoint none of whose inputs required gradients",
    "detached": "the value was cut off from the graph by a detaching call",
    "frozen": "the value depends only on frozen parameters and on inputs that require no gradient",
    "output_unused": "no result that the loss uses depends on this output",
    "not_reached": "the value requires a gradient, but the backward pass never came to it",
    "inside_leaf": "the value lives inside a module or function that is observed as one node",
    "changed_through_view": "the value was changed in place through a view, so autograd replaced its node",
    "no_probe": "no probe of this engine may stand at the value without changing what is computed",
    "statistic_failed": "the gradient arrived, but no statistic could be computed of it",
    "not_reduced": "the gradient stays on its rank until a later backward pass, which adds it up over the ranks",
    "used_outside": "the value leaves the model, and what its use out there sends back cannot be told apart",
    "merged_use": "the call reads the value once for several arguments; its whole part is counted at the first of them",
    "untraceable_use": "the autograd node through which the call sends its part back cannot be told",
}
