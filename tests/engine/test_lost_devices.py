"""Plans of a run that lost ranks count on the ranks that are left; no processes."""

import pytest
import torch
from torch import nn

from pipetransformer.config import Config, PlanConfig
from pipetransformer.planner import Cluster, PauseModel
from pipetransformer.run.arguments import Workload
from pipetransformer.run.measured_costs import PricingInputs
from pipetransformer.run.step_costs import StepFactors
from pipetransformer.transformation.plan_search import first_plan, next_plan
from tests.engine.even_profile import even_profile
from tests.engine.runs import make_run, plane_of

ROWS = 12


def run_of(members, world_size=4, **plan):
    """What planning reads of a run whose generation has these members."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return make_run(
        plane=plane_of(world_size=world_size, members=tuple(members)),
        config=Config(plan=PlanConfig(reshape="always", **plan)),
        model=model,
        profile=even_profile(model, torch.randn(ROWS, 8), microbatch_samples=[1, ROWS]),
        cluster=Cluster(devices_per_node=world_size, device_memory_bytes=1 << 30),
        workload=Workload(ROWS, ROWS, 1, False, lambda rows: None),
    )


@pytest.mark.parametrize(
    ("members", "bound", "replicas"),
    [((0, 1, 2, 3), None, 4), ((0, 2, 3), None, 3), ((1,), None, 1), ((0, 2, 3), 2, 2)],
)
def test_a_plan_has_no_more_replicas_than_ranks_live(members, bound, replicas):
    run = run_of(members, max_replicas=bound, num_stages=1)
    assert first_plan(run, 0, 0).num_replicas == replicas


def test_a_lost_rank_is_not_offered_again():
    held = first_plan(run_of((0, 1, 2), num_stages=1), 0, 0)
    pricing = PricingInputs(
        pauses=PauseModel(),
        elapsed_ns=None,
        remaining_steps=99,
        steps=StepFactors(),
        cache_slots=0,
    )
    again = next_plan(run_of((0, 1, 2), num_stages=1), 0, held, pricing)
    assert (again.num_replicas, again.transition.accepted) == (3, True)
    told = [*again.reasons, *again.refusals, again.transition.rule]
    assert not [text for text in told if "R=4" in text]
