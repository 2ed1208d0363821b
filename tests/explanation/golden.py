"""An explanation written by hand: what its text must look like is in plan.txt."""

from pipetransformer.explanation import (
    Counterfactual,
    Explanation,
    Inputs,
    Limit,
    Measurement,
    StageReport,
)
from pipetransformer.planner import Candidate, Plan, Transition

_HOW = dict(
    num_stages=2,
    num_replicas=2,
    num_microbatches=4,
    cuts=(4, 8, 12),
    prefix="replicated",
    cache="host",
)

PLAN = Plan(
    **_HOW,
    boundary=4,
    samples_per_microbatch=2,
    global_batch=16,
    schedule="1f1b",
    checkpoint="except_last",
    predicted_step_ns=60_000_000,
    lower_bound_ns=58_000_000,
    simulated_step_ns=61_234_567,
    bubble_fraction=0.2,
    bytes_per_stage=(40_000_000, 30_000_000),
    idle_devices=1,
    transition=Transition(
        kind="shape",
        offered="K=2 R=2 M=4 1f1b",
        terms_ns={"prepare": 20_000_000, "move": 5_000_000, "rewire": 10_000_000},
        anyway_terms_ns={"prepare": 5_000_000, "rewire": 10_000_000},
        pause_ns=35_000_000,
        gain_ns_per_step=4_000_000,
        remaining_steps=100,
        pay_back_steps=5,
        accepted=True,
        rule="400.000 ms in all, more than 1.25 x the pause of 20.000 ms it adds",
    ),
    candidates=(
        Candidate(
            **_HOW,
            schedule="1f1b",
            predicted_step_ns=60_000_000,
            lower_bound_ns=58_000_000,
            simulated_step_ns=61_234_567,
        ),
        Candidate(
            **{**_HOW, "cache": "none", "cuts": (4, 7, 12)},
            schedule="gpipe",
            predicted_step_ns=70_000_000,
            lower_bound_ns=70_000_000,
            simulated_step_ns=71_000_000,
            lost="15.9 % slower",
        ),
    ),
    refusals=("K=1 does not fit: layers 4-11 miss 7 bytes of 50000000",),
    reasons=("K=2 R=2 M=4 1f1b, host cache has the shortest simulated step",),
    profile_hash=0xABC,
    cluster_hash=0xDEF,
)

EXPLANATION = Explanation(
    plan=PLAN,
    step_ns=61_234_567,
    inputs=Inputs(
        model="vit",
        num_layers=12,
        boundary=4,
        global_batch=16,
        num_nodes=1,
        devices_per_node=5,
        device_memory_bytes=50_000_000,
        profile_hash=PLAN.profile_hash,
        cluster_hash=PLAN.cluster_hash,
        notes=("note: the plan was made for another cluster",),
    ),
    stages=(
        StageReport(
            stage=0,
            first_layer=4,
            last_layer=7,
            device_bytes=40_000_000,
            forward_ns=3_000_000,
            input_grad_ns=2_666_666,
            weight_grad_ns=3_000_000,
            recompute_ns=3_000_000,
            in_flight=2,
            bubble_share=0.25,
        ),
        StageReport(
            stage=1, first_layer=8, last_layer=11, device_bytes=None, bubble_share=0.15
        ),
    ),
    limits=(
        Limit(
            resource="stage 0",
            change="its device computes twice as fast",
            step_ns=50_000_000,
            gain_ns=11_234_567,
        ),
        Limit(
            resource="memory",
            change="twice the memory and planned again: K=1 R=5 M=1 layers 4-11",
            step_ns=61_234_567,
            gain_ns=0,
        ),
    ),
    counterfactuals=(
        Counterfactual(
            name="best_static",
            title="best static plan",
            plan="K=4 R=1 M=8 layers 0-2|3-5|6-8|9-11, zb-h1",
            step_ns=122_469_134,
            peak_bytes=49_000_000,
            reason="nothing frozen",
        ),
        Counterfactual(
            name="plain_ddp",
            title="plain DDP",
            reason="K=1 does not fit: layers 0-11 miss 9 bytes of 50000000",
        ),
    ),
    measured=(
        Measurement(
            what="step of epoch 3", predicted_ns=61_234_567, measured_ns=60_000_000
        ),
        Measurement(
            what="pause before epoch 3", predicted_ns=None, measured_ns=40_000_000
        ),
    ),
)
