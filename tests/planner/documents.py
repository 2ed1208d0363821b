"""Valid profiles, clusters and plans as plain JSON, to be malformed by tests."""

import copy
import json

from pipetransformer.planner import Candidate, Cluster, Plan, Profile
from pipetransformer.planner.transition import Transition

PROFILE = {
    "version": 1,
    "name": "demo",
    "microbatch_samples": [1, 4],
    "layers": [
        {
            "name": f"{i}.Linear",
            "forward_ns": [10, 40],
            "input_grad_ns": [10, 40],
            "weight_grad_ns": [10, 40],
            "forward_only_ns": [9, 36],
            "parameter_bytes": 8,
            "activation_bytes_per_sample": 4,
            "weight_grad_activation_bytes_per_sample": 4,
            "activation_bytes_per_microbatch": 3,
            "shared_activation_bytes": 2,
            "boundary_bytes_per_sample": 4,
            "trainable": True,
        }
        for i in range(3)
    ],
    "tied_layers": [[0, 2]],
    "skips": [[0, 1], [0, 2]],
}
CLUSTER = {
    "version": 1,
    "num_nodes": 2,
    "devices_per_node": 4,
    "device_memory_bytes": 1000,
    "device_link_bytes_per_s": 10,
    "device_link_latency_ns": 1,
    "network_bytes_per_s": None,
    "network_latency_ns": 2,
    "optimizer_bytes_per_parameter_byte": 2.0,
    "context_bytes": 3,
    "cache": {
        "host_bytes": 1,
        "host_bytes_per_s": 2,
        "disk_bytes": 3,
        "disk_bytes_per_s": 4,
    },
}
_CANDIDATE = Candidate(
    num_stages=2,
    num_replicas=2,
    num_microbatches=4,
    cuts=(1, 2, 4),
    schedule="1f1b",
    prefix="replicated",
    cache="host",
    predicted_step_ns=100,
    lower_bound_ns=90,
    simulated_step_ns=95,
)
_TRANSITION = Transition(
    kind="shape",
    offered="K=2",
    terms_ns={"prepare": 10, "move": 5},
    anyway_terms_ns={"prepare": 3},
    pause_ns=15,
    gain_ns_per_step=-3,
    remaining_steps=7,
    accepted=False,
    rule="it costs more than it gains",
    moved_bytes=12,
)
PLAN = Plan(
    boundary=1,
    num_stages=2,
    num_replicas=2,
    num_microbatches=4,
    samples_per_microbatch=2,
    global_batch=16,
    cuts=(1, 2, 4),
    schedule="1f1b",
    checkpoint="except_last",
    prefix="replicated",
    cache="host",
    copies="serial",
    predicted_step_ns=100,
    lower_bound_ns=90,
    simulated_step_ns=95,
    bubble_fraction=0.25,
    bytes_per_stage=(64, 128),
    idle_devices=4,
    transition=_TRANSITION,
    candidates=(_CANDIDATE,),
    refusals=("K=3 does not fit",),
    reasons=("the shortest step",),
    profile_hash=2**63 + 1,
    cluster_hash=5,
).to_dict()
# What is changed in it is found by its own rule, not by the hash.
del PLAN["plan_hash"]
FORMATS = {
    "profile": (Profile, PROFILE),
    "cluster": (Cluster, CLUSTER),
    "plan": (Plan, PLAN),
}
DROP = object()


def changed(document, path, value):
    """A copy with the entry at ``path`` set, or removed if ``DROP``."""
    changed_copy = copy.deepcopy(document)
    at = changed_copy
    for key in path[:-1]:
        at = at[key]
    if value is DROP:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed_copy


def text(document):
    return json.dumps(document)
