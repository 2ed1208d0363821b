"""Room ``planner``: from measured layer costs to a plan, and why."""

from pipetransformer.planner import paper, solvers
from pipetransformer.planner.cluster import CacheTiers, Cluster
from pipetransformer.planner.measure import measure_profile
from pipetransformer.planner.plan import Candidate, Plan
from pipetransformer.planner.profile import LayerProfile, Profile
from pipetransformer.planner.search import InfeasiblePlan, search

__all__ = [
    "CacheTiers",
    "Candidate",
    "Cluster",
    "InfeasiblePlan",
    "LayerProfile",
    "Plan",
    "Profile",
    "measure_profile",
    "paper",
    "search",
    "solvers",
]
