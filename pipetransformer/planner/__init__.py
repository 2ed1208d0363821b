"""Room ``planner``: from measured layer costs to a plan, and why."""

from pipetransformer.planner import paper
from pipetransformer.planner._handed_on import NeedsWholeBatches
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.change_terms import ChangeTerms
from pipetransformer.planner.cluster import (
    HOST_LINK_BYTES_PER_S,
    HOST_ROUND_NS,
    HOST_STEP_NS,
    NETWORK_BYTES_PER_S,
    CacheTiers,
    Cluster,
)
from pipetransformer.planner.layer_profile import LayerProfile, Profile
from pipetransformer.planner.least_rows import least_rows
from pipetransformer.planner.measure import check_layers, profile, seconds_in_a_row
from pipetransformer.planner.native import prefix_cuts, step_costs
from pipetransformer.planner.options import SearchOptions
from pipetransformer.planner.pauses import PauseModel, RunningMean
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.replan import replan, try_out
from pipetransformer.planner.run_plan import RunPlan
from pipetransformer.planner.search import InfeasiblePlan, search, what_would_fit
from pipetransformer.planner.transition import Transition
from pipetransformer.planner.trial import Trial, corrected

__all__ = [
    "HOST_LINK_BYTES_PER_S",
    "HOST_ROUND_NS",
    "HOST_STEP_NS",
    "NETWORK_BYTES_PER_S",
    "CacheTiers",
    "Candidate",
    "ChangeTerms",
    "Cluster",
    "InfeasiblePlan",
    "LayerProfile",
    "NeedsWholeBatches",
    "PauseModel",
    "Plan",
    "Profile",
    "RunPlan",
    "RunningMean",
    "SearchOptions",
    "Transition",
    "Trial",
    "check_layers",
    "corrected",
    "least_rows",
    "paper",
    "prefix_cuts",
    "profile",
    "replan",
    "search",
    "seconds_in_a_row",
    "step_costs",
    "try_out",
    "what_would_fit",
]
