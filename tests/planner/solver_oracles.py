"""What the solvers must find, by enumeration and by tables without any shortcut."""

from dataclasses import dataclass
from itertools import pairwise

from pipetransformer.testing.solvers import Costs, Limits
from tests.planner.instances import PLENTY, all_cuts, random_costs


@dataclass(frozen=True)
class Instance:
    """One row of layers with all that may decide where it is cut."""

    num_stages: int
    forward: Costs
    backward: Costs
    limits: Limits
    repeats: int
    cut_costs: list[int]
    hiding_cut_costs: list[int]
    reduce_costs: list[int]
    reduce_slack: list[int]
    accumulation_steps: int = 1

    @property
    def num_layers(self):
        return len(self.forward.layers)

    def memory(self, index, begin, end):
        bytes_ = sum((self.limits.layer_bytes or [])[begin:end])
        if self.limits.microbatches_kept is not None:
            kept = sum(self.limits.kept_bytes[begin:end])
            bytes_ += self.limits.microbatches_kept[index] * kept
        return bytes_

    def exposed(self, cuts):
        """The longest all-reduce that is left when the slowest stages are done."""
        stages = list(pairwise(cuts))
        slowest = [stage_cost(self.backward, *stage) for stage in stages]
        longest = 0
        for k, (begin, end) in enumerate(stages):
            reduced = sum(self.reduce_costs[begin:end]) - self.reduce_slack[begin]
            hidden = self.repeats * (max(slowest) - max(slowest[k:]))
            hidden += sum(self.hiding_cut_costs[j] for j in cuts[1 : k + 1])
            longest = max(longest, reduced - hidden)
        return longest

    def value(self, cuts):
        """What best_cuts makes least."""
        return (
            self.repeats * (largest(self.forward, cuts) + largest(self.backward, cuts))
            + sum(self.cut_costs[j] for j in cuts[1:-1])
            + self.exposed(cuts) // self.accumulation_steps
        )


def stage_cost(costs, begin, end):
    layers = sum(costs.layers[begin:end])
    if costs.boundaries is None:
        return layers
    entry, exit_ = costs.boundaries[begin], costs.boundaries[end]
    return max(layers, entry, exit_) if costs.overlapped else layers + entry + exit_


def largest(costs, cuts):
    return max(stage_cost(costs, *stage) for stage in pairwise(cuts))


def enumerate_best(given):
    """The least of each objective and the first cuts that reach it, by its name."""
    best = {}

    def offer(name, value, cuts):
        if name not in best or value < best[name][0]:
            best[name] = value, list(cuts)

    allowed = given.limits.cut_allowed
    for cuts in all_cuts(given.num_layers, given.num_stages, allowed):
        memory = max(given.memory(k, *stage) for k, stage in enumerate(pairwise(cuts)))
        offer("memory", memory, cuts)
        if memory > given.limits.stage_bytes:
            continue
        forward, backward = largest(given.forward, cuts), largest(given.backward, cuts)
        offer("min_max", forward, cuts)
        offer("gpipe", forward + backward, cuts)
        offer("cheapest", sum(given.cut_costs[j] for j in cuts[1:-1]), cuts)
        offer("best", given.value(cuts), cuts)
    return best


def min_max_table(costs, limits, num_stages):
    """The least largest stage by the O(K L^2) table; None if there is none."""
    n = len(costs.layers)
    given = Instance(num_stages, costs, costs, limits, 0, [], [], [], [])
    allowed = limits.cut_allowed or [True] * (n + 1)
    cost = {
        (i, j): stage_cost(costs, i, j) for i in range(n) for j in range(i + 1, n + 1)
    }
    best = {0: 0}
    for k in range(num_stages):
        reached = {}
        for j in range(1, n + 1) if k < num_stages - 1 else [n]:
            if j < n and not allowed[j]:
                continue
            values = [
                max(value, cost[i, j])
                for i, value in best.items()
                if i < j and given.memory(k, i, j) <= limits.stage_bytes
            ]
            if values:
                reached[j] = min(values)
        best = reached
    return best.get(n)


def random_instance(rng, most_layers=9, most_stages=5):
    n = rng.randint(1, most_layers)
    num_stages = rng.randint(1, min(n, most_stages))
    cuts = [rng.choice([0, 5, rng.randint(0, 60)]) for _ in range(n + 1)]
    cuts = _sometimes(rng, cuts)
    reduced = _sometimes(rng, random_costs(rng, n))
    scale = rng.choice([1, 1, 20])  # some hide nearly nothing
    return Instance(
        num_stages,
        _random_row(rng, n),
        _random_row(rng, n),
        random_limits(rng, n, num_stages),
        rng.choice([0, 1, 3, 17]),
        cuts,
        _sometimes(rng, [rng.randint(0, cost) for cost in cuts]),
        [scale * cost for cost in reduced],
        sorted(rng.randint(0, 60) for _ in range(n + 1)),
        rng.choice([1, 1, 2, 7]),
    )


def random_limits(rng, n, num_stages):
    """No memory limit, one equal for all stages, or one by position."""
    allowed = [rng.random() < 0.85 for _ in range(n + 1)]
    kind = rng.randrange(3)
    if kind == 0:
        return Limits(stage_bytes=PLENTY, cut_allowed=allowed)
    fixed, kept, counts = random_costs(rng, n), None, None
    total = sum(fixed)
    if kind == 2:
        kept = random_costs(rng, n)
        most = rng.randint(1, 6)
        counts = [min(most, num_stages - k) for k in range(num_stages)]
        if rng.random() < 0.3:  # in no order, as no schedule has them
            counts = [rng.randint(0, 4) for _ in range(num_stages)]
        total += sum(kept) * sum(counts) // num_stages
    cap = int(total / num_stages * rng.uniform(0.7, 3))
    return Limits(fixed, cap, kept, counts, allowed)


def _random_row(rng, n):
    boundaries = None
    if rng.random() < 0.6:
        boundaries = [rng.choice([0, 3, rng.randint(0, 30)]) for _ in range(n + 1)]
        if rng.random() < 0.9:
            boundaries[0] = boundaries[n] = 0
    return Costs(random_costs(rng, n), boundaries, rng.random() < 0.5)


def _sometimes(rng, values):
    return values if rng.random() < 0.6 else [0] * len(values)
