"""Profiling on several slots: at the same time, and the median of all."""

import threading

import torch
from torch import nn

from simulated.slot_profile import PROFILES, profile_on_slots
from tests.benchmarks.test_simulated import layer, profile


def test_slots_profile_at_the_same_time_and_their_median_counts():
    meeting = threading.Barrier(3, timeout=60)

    def profiler(model, inputs, *, microbatch_samples, repeats):
        meeting.wait()  # none returns before all have come
        assert (len(inputs), microbatch_samples, repeats) == (4, (2,), 1)
        return profile(layer(*model))

    times = [(1, 5, 2), (2, 4, 9), (9, 3, 3)]
    found = profile_on_slots(times, torch.zeros(4, 1), (2,), profiler=profiler)
    assert found.layers == (layer(2, 4, 3),)


def test_one_slot_profiles_in_this_thread():
    threads = []

    def profiler(model, inputs, *, microbatch_samples, repeats):
        threads.append(threading.current_thread())
        return profile(layer(1, 1, 1))

    profile_on_slots([nn.Sequential()], torch.zeros(1, 1), (1,), profiler=profiler)
    assert threads == PROFILES * [threading.current_thread()]


def test_two_slots_measure_a_real_model():
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    found = profile_on_slots(models, torch.zeros(8, 4), (2, 8))
    assert found.microbatch_samples == (2, 8)
    assert [each.name for each in found.layers] == ["0.Linear", "1.Tanh"]
    assert all(model[0].weight.grad is None for model in models)
