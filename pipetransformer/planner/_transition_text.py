"""The rule that decided about a change of plan, as a sentence with its numbers."""

from __future__ import annotations

from pipetransformer import _C


def sentence(
    offer: _C.planner.Offer,
    verdict: _C.planner.Verdict,
    *,
    name: str,
    staying: str,
    crowded: _C.planner.Crowded | None,
    memory_bytes: int,
) -> str:
    """Return why the plan `name` was taken or refused.

    Args:
        offer: what was decided about.
        verdict: the decision.
        name: the offered plan in short.
        staying: the plan in force in short; where it cannot go on, why not.
        crowded: the device that both plans need, if there is one.
        memory_bytes: of a device.
    """
    rules = _C.planner.TransitionRule
    gain, left = verdict.gain_ns_per_step, offer.remaining_steps
    saves = f"{name} saves {milliseconds(gain)} per step"
    if offer.pace_permille != 1000:
        saves += f" (at {decimal(offer.pace_permille)} x the simulated time)"
    total = f"{milliseconds(gain * left)} in the {steps(left)} left"
    factor = decimal(1000 + offer.hysteresis_permille)
    price = f"{factor} x the pause of {milliseconds(verdict.extra_pause_ns)} it adds"
    if verdict.rule == rules.CANNOT_STAY:
        return f"{name} whatever it costs: {staying}"
    if verdict.rule == rules.ALWAYS:
        return f"{saves}, and changes of plan are not priced"
    if verdict.rule == rules.PAYS:
        after = steps(verdict.pay_back_steps or 0)
        return f"{saves}, {total}: more than {price}, paid back after {after}"
    if verdict.rule == rules.NEVER:
        return f"{staying} stays: changes of plan are switched off"
    if verdict.rule == rules.TOO_LITTLE:
        return f"{staying} stays: {saves}, less than 2 %"
    if verdict.rule == rules.CROWDED and crowded is not None:
        stuck = offer.step_in_force_ns is None
        return (f"{name} is out of reach: " if stuck else f"{staying} stays: ") + (
            f"until the change is done device {crowded.device} of node {crowded.node} "
            f"would hold {crowded.old_bytes} bytes of the old plan and "
            f"{crowded.new_bytes} of {name}, more than {memory_bytes}"
        )
    if verdict.rule == rules.TOO_DEAR:
        return f"{staying} stays: {saves}, {total}: not more than {price}"
    return (
        f"{staying} stays: {saves}, but K or R changed "
        f"{milliseconds(offer.since_last_ns or 0)} ago, not more than 10 pauses of "
        f"{milliseconds(offer.pause_ns)}"
    )


def nothing_better(name: str, boundary_changes: bool) -> str:
    """Return why nothing but the boundary changes, or nothing at all."""
    what = "the boundary moves, " if boundary_changes else ""
    return f"{what}{name} stays: no other plan has a shorter step"


def steps(count: int) -> str:
    """Return for example ``1 step``."""
    return f"{count} step" if count == 1 else f"{count} steps"


def milliseconds(nanoseconds: int) -> str:
    """Return a duration such as ``12.345 ms``; from 10 s on ``12.3 s``."""
    microseconds = nanoseconds // 1000
    if microseconds >= 10_000_000:
        tenths = microseconds // 100_000
        return f"{tenths // 10}.{tenths % 10} s"
    return f"{microseconds // 1000}.{microseconds % 1000:03d} ms"


def decimal(permille: int) -> str:
    """Return thousandths as a decimal number without trailing zeros."""
    whole, part = divmod(permille, 1000)
    text = f"{whole}.{part:03d}".rstrip("0")
    return text.removesuffix(".")
