"""The pipelines that ``simulator_accuracy.py`` simulates and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipe.encoder import Shape, batch, encoder, mean_loss
from pipetransformer import planner
from pipetransformer.planner import Profile
from simulated.slot_profile import profile_on_slots
from simulated.steps import SCHEDULES, Case, median_profile
from simulated.trials import Subject
from simulated.waits import WaitPipeline, random_pipelines

MODES = ("never", "always")
COMPUTE = "compute"
PROFILES = 3  # of waiting stages per repeat; the median counts
COUNTS = (2, 4, 8)  # M of what computes


def waiting_subjects(
    lengths: Sequence[int], per_length: int, seed: int, *, steps: int
) -> list[Subject]:
    """Return random pipelines of stages that wait, under every schedule.

    Every second one is run with recomputation.

    Args:
        lengths: K of the pipelines.
        per_length: Pipelines of each K.
        seed: Of the random draws.
        steps: Of one repeat.
    """
    found = []
    for number, pipeline in enumerate(random_pipelines(lengths, per_length, seed)):
        mode = MODES[(number + number // per_length) % len(MODES)]
        found.append(_waiting(number, pipeline, mode, steps))
    return found


def _waiting(number: int, pipeline: WaitPipeline, mode: str, steps: int) -> Subject:
    model, inputs = pipeline.model(), pipeline.batch()

    def alone() -> Profile:
        return median_profile(
            [
                planner.profile(
                    model, inputs, microbatch_samples=pipeline.sizes(), repeats=1
                )
                for _ in range(PROFILES)
            ]
        )

    cuts = tuple(range(pipeline.num_stages + 1))
    return Subject(
        name=f"{pipeline.mix} {number}",
        kind=pipeline.mix,
        model=pipeline.model,
        inputs=inputs,
        targets=torch.zeros_like(inputs),
        loss=lambda outputs, targets: (outputs - targets).mean(),
        cases=tuple(
            Case(cuts, pipeline.num_microbatches, schedule, mode)
            for schedule in SCHEDULES
        ),
        alone=alone,
        steps=steps,
    )


def computing_subjects(
    shape: Shape, num_stages: Sequence[int], *, steps: int
) -> list[Subject]:
    """Return the encoder in K equal stages for each K, profiled on K slots at once.

    GPipe with several M; at the middle one also the other schedules, and GPipe with
    recomputation.
    """
    inputs, targets = batch(shape, 0)
    sizes = sorted({shape.rows // count for count in COUNTS})
    found = []
    for length in num_stages:
        cuts = tuple(shape.blocks * j // length for j in range(length + 1))
        cases = [Case(cuts, count, "gpipe") for count in COUNTS]
        cases += [Case(cuts, COUNTS[1], schedule) for schedule in SCHEDULES[1:]]
        cases.append(Case(cuts, COUNTS[1], "gpipe", "always"))
        found.append(
            Subject(
                name=f"{COMPUTE} K={length}",
                kind=f"{COMPUTE} K={length}",
                model=lambda: encoder(shape, 0),
                inputs=inputs,
                targets=targets,
                loss=mean_loss,
                cases=tuple(cases),
                alone=_profiler(shape, inputs, sizes, length),
                steps=steps,
            )
        )
    return found


def _profiler(
    shape: Shape, inputs: Tensor, sizes: Sequence[int], num_slots: int
) -> Callable[[], Profile]:
    models = [encoder(shape, 0) for _ in range(num_slots)]
    return lambda: profile_on_slots(models, inputs, sizes)
