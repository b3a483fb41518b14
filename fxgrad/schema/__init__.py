"""What passes between the stages: frozen dataclasses, and the protocol of a sink.

Nothing here imports torch, so that a saved flow can be read, compared and drawn without it.

Units and conventions, used everywhere in the package:

* ``gradient``: dL/d(value), of the shape of the value.  No loss scale is divided out.
* ``l2_norm``: square root of the sum of squared moduli; ``rms``: ``l2_norm / sqrt(numel)``;
  ``max_abs``: the largest modulus.  All dimensionless numbers of the loss's unit per unit of the value.
* a *site* is written ``key`` + ``output_position``: ``"lstm[1][0]"`` is the first tensor of the second
  element that the node ``lstm`` returned, ``"head"`` the only tensor that ``head`` returned.
"""

from __future__ import annotations

from fxgrad.schema.comparing import Change, Comparison
from fxgrad.schema.drawing import (
    DirectionWord,
    PageThemeWord,
    PageWords,
    PictureWords,
    ScaleWord,
    TableWords,
    ThemeWord,
)
from fxgrad.schema.failure import Failure, FailureCause
from fxgrad.schema.findings import RULES, Confidence, Diagnosis, Finding, NotChecked, Severity
from fxgrad.schema.flow import CaptureReport, EventInfo, GradientFlow, Sink
from fxgrad.schema.history import FlowSeries, History, Series
from fxgrad.schema.log import Log, LogEntry, RunFileReport
from fxgrad.schema.precision import Fit, Precision, PrecisionRow
from fxgrad.schema.ranks import OtherCourse, Placement, Ranks, Spread
from fxgrad.schema.records import (
    BlindSpot,
    Consumer,
    Edge,
    ModuleCall,
    ModuleFlow,
    Node,
    ParameterRecord,
    Rewritten,
    Site,
)
from fxgrad.schema.rewriting import NotRewritten, RewriteReport, RuleRecord
from fxgrad.schema.statistics import Statistics
from fxgrad.schema.values import (
    Activity,
    BufferRecord,
    ChannelSums,
    Constant,
    LossOp,
    OptimizerFacts,
    StepFacts,
    Update,
)
from fxgrad.schema.words import REASONS, FrontEnd, Level, NormWord, Reason, SiteKind

__all__ = [
    "REASONS",
    "RULES",
    "Activity",
    "BlindSpot",
    "BufferRecord",
    "CaptureReport",
    "Change",
    "ChannelSums",
    "Comparison",
    "Confidence",
    "Constant",
    "Consumer",
    "Diagnosis",
    "DirectionWord",
    "Edge",
    "EventInfo",
    "Failure",
    "FailureCause",
    "Finding",
    "Fit",
    "FlowSeries",
    "FrontEnd",
    "GradientFlow",
    "History",
    "Level",
    "Log",
    "LogEntry",
    "LossOp",
    "ModuleCall",
    "ModuleFlow",
    "Node",
    "NormWord",
    "NotChecked",
    "NotRewritten",
    "OptimizerFacts",
    "OtherCourse",
    "PageThemeWord",
    "PageWords",
    "ParameterRecord",
    "PictureWords",
    "Placement",
    "Precision",
    "PrecisionRow",
    "Ranks",
    "Reason",
    "RewriteReport",
    "Rewritten",
    "RuleRecord",
    "RunFileReport",
    "ScaleWord",
    "Series",
    "Severity",
    "Sink",
    "Site",
    "SiteKind",
    "Spread",
    "Statistics",
    "StepFacts",
    "TableWords",
    "ThemeWord",
    "Update",
]
