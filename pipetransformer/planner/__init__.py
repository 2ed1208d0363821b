"""Room ``planner``: from measured layer costs to a plan, and why."""

from pipetransformer.planner import paper, solvers
from pipetransformer.planner.cluster import CacheTiers, Cluster
from pipetransformer.planner.layer_profile import LayerProfile, Profile
from pipetransformer.planner.measure import profile
from pipetransformer.planner.plan import Candidate, Plan
from pipetransformer.planner.search import InfeasiblePlan, search

__all__ = [
    "CacheTiers",
    "Candidate",
    "Cluster",
    "InfeasiblePlan",
    "LayerProfile",
    "Plan",
    "Profile",
    "paper",
    "profile",
    "search",
    "solvers",
]
