"""Why a plan is as it is: reports for people and for programs."""

from pipetransformer.explanation.document import Column, Section, Table
from pipetransformer.explanation.explain import explain_plan, hash_notes, outline
from pipetransformer.explanation.outcomes import Measurement
from pipetransformer.explanation.report import (
    Counterfactual,
    Explanation,
    Inputs,
    Limit,
    StageReport,
)
from pipetransformer.explanation.run import RunExplanation
from pipetransformer.explanation.run_summary import explain_run

__all__ = [
    "Column",
    "Counterfactual",
    "Explanation",
    "Inputs",
    "Limit",
    "Measurement",
    "RunExplanation",
    "Section",
    "StageReport",
    "Table",
    "explain_plan",
    "explain_run",
    "hash_notes",
    "outline",
]
