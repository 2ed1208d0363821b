"""The decision by cost: against the true cost of all passes, and its turning point."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipetransformer.autocache import Admission, Prospect, TierRates, decide, on_disk
from pipetransformer.autocache.admission import MARGIN

RATES = st.builds(
    TierRates,
    bytes_per_s=st.integers(10**6, 10**11),
    record_ns=st.integers(0, 10**5),
    write_bytes_per_s=st.integers(10**6, 10**11),
    write_record_ns=st.integers(0, 10**5),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
)


@st.composite
def prospects(draw):
    samples = draw(st.integers(1, 40))
    prefix = draw(st.integers(1, 10**7))
    return Prospect(
        boundary=1,
        prefix_ns=prefix,
        record_bytes=draw(st.integers(1, 10**7)),
        held=draw(st.integers(1, samples)),
        samples=samples,
        passes=draw(st.integers(1, 6)),
        keeps=draw(st.booleans()),
        stored_ns=draw(st.one_of(st.none(), st.just(0), st.integers(0, prefix))),
        active_ns=draw(st.integers(0, 10**6)),
        sharers=draw(st.sampled_from([1, 1, 3])),
        copy_ns=draw(st.sampled_from([0, 0, 10, 10**4])),
        copied=draw(st.sampled_from([0, 0, 3, samples])),
        copied_ns=draw(st.integers(0, 10**5)),
    )


def played(rates, prospect):
    """The cost of all passes, sample by sample, beyond the steps without a prefix."""
    size, active = prospect.record_bytes, prospect.active_ns
    read = rates.record_ns + 1e9 * size / rates.bytes_per_s
    read *= prospect.sharers
    write = rates.write_record_ns + 1e9 * size / rates.write_bytes_per_s
    write *= prospect.sharers
    step = max(read, active + (1 - rates.overlap) * read) + prospect.copy_ns
    total = 0.0
    for sample in range(prospect.samples):
        room = sample < prospect.held
        behind = prospect.stored_ns if room else None  # layers behind its record
        copied = False
        for number in range(prospect.passes):
            if behind is None:
                total += rates.record_ns + prospect.prefix_ns
            else:
                total += prospect.copied_ns if copied else step - active + behind
                copied = behind == 0 and sample < prospect.copied
            again = number + 1 < prospect.passes or prospect.keeps
            if room and behind != 0 and again:
                total += write
                behind = 0
    return total


@settings(deadline=None, max_examples=300)
@given(RATES, prospects())
def test_caches_where_the_cost_of_all_passes_is_no_more_than_the_layers(
    rates, prospect
):
    cached = played(rates, prospect)
    recomputed = prospect.samples * prospect.passes * prospect.prefix_ns
    found = decide(rates, prospect)
    assert found.gain_ns * prospect.samples == pytest.approx(
        recomputed - cached, abs=1e-6 * (cached + recomputed)
    )
    held = prospect.held * prospect.passes * prospect.prefix_ns
    limit = recomputed + (MARGIN - 1) * held
    if abs(cached - limit) > 1e-6 * cached:
        assert found.caches == (cached <= limit)


@settings(deadline=None, max_examples=300)
@given(RATES, prospects(), st.booleans())
def test_turns_on_either_side_of_the_rate_that_it_names(rates, prospect, caches_now):
    first = decide(rates, prospect, caches_now=caches_now)
    rate = first.turns_at_bytes_per_s
    assume(rate is not None and 1000 < rate < 10**14)
    slow = dataclasses.replace(rates, bytes_per_s=rate * 98 // 100)
    fast = dataclasses.replace(rates, bytes_per_s=rate * 102 // 100 + 1)
    # From then on the decision is in force.
    assert not decide(slow, prospect, caches_now=first.caches).caches
    assert decide(fast, prospect, caches_now=first.caches).caches


@settings(deadline=None, max_examples=200)
@given(RATES, prospects())
def test_never_goes_to_and_fro_on_the_same_numbers(rates, prospect):
    found = decide(rates, prospect)
    again = decide(rates, prospect, caches_now=found.caches)
    assert again.caches == found.caches
    assert Admission.from_dict(again.to_dict()) == again


HOST = TierRates(
    bytes_per_s=10**10, record_ns=0, write_bytes_per_s=10**10, write_record_ns=0
)
DISK = TierRates(
    bytes_per_s=10**9,
    record_ns=0,
    write_bytes_per_s=10**9,
    write_record_ns=0,
    overlap=1.0,
)


def test_copies_make_thin_layers_worth_it():
    thin = Prospect(
        boundary=1,
        prefix_ns=300,
        record_bytes=4000,  # 0.4 us from memory
        held=100,
        samples=100,
        passes=20,
    )
    assert not decide(HOST, thin).caches
    found = decide(HOST, dataclasses.replace(thin, copied=90, copied_ns=20))
    assert found.caches and (found.copied, found.copied_ns) == (90, 20)
    assert "read 0.4 us (0.0 us for 90 on devices) a sample" in found.text
    # Of ten reads one comes from the host.
    assert found.usual_rates == (10**11, 18)


def test_copies_are_of_what_is_in_memory_first():
    found = Prospect(
        boundary=1,
        prefix_ns=300,
        record_bytes=4000,
        held=20,
        samples=100,
        passes=20,
        copied=50,
        copied_ns=20,
    )
    assert found.copied_share == 1
    lower = on_disk(found, HOST, held=60, disk_bytes=8192, sharers=1)
    assert (lower.copied, lower.copied_ns, lower.copied_share) == (30, 20, 0.5)


def of_both(active_ns, sharers=1, disk=DISK):
    """A decision on 20 samples in memory and 50 of the other 80 on disk."""
    found = Prospect(
        boundary=1,
        prefix_ns=10_000,
        record_bytes=4000,  # 0.4 us from memory
        held=20,
        samples=100,
        passes=9,
        active_ns=active_ns,
    )
    lower = on_disk(found, HOST, held=50, disk_bytes=8192, sharers=sharers)
    assert (lower.held, lower.record_bytes, lower.copy_ns) == (50, 8192, 400)
    below = decide(disk, lower, tier="disk")
    return dataclasses.replace(decide(HOST, found), disk=below)


def test_a_disk_is_used_where_the_steps_hide_its_reads():
    # 8.2 us a read, for every second sample: hidden behind steps of 4.1 us and more.
    hidden = of_both(4096)
    assert hidden.disk.read_ns == 400 and hidden.uses_disk
    assert hidden.used_samples == 70
    half = of_both(2048)
    assert half.disk.read_ns == 400 + 8192 / 2 and half.uses_disk
    shared = of_both(2048, sharers=4)
    assert shared.disk.read_ns == 400 + 4 * 8192 - 4096 and not shared.uses_disk
    assert shared.caches and shared.used_samples == 20
    text = shared.text
    assert "cached for 20 of 100 samples; would turn" in text
    assert "; on disk: read 29.1 us a sample against 10.0 us recomputed (disk " in text
    assert text.endswith("recomputed; would turn above 3.8 GB/s")
    assert Admission.from_dict(shared.to_dict()) == shared


def test_a_disk_takes_only_what_memory_has_no_room_for():
    found = Prospect(
        boundary=1, prefix_ns=1, record_bytes=1, held=90, samples=100, passes=2
    )
    assert on_disk(found, HOST, held=50, disk_bytes=1, sharers=1).held == 10


def test_reads_made_ahead_cost_nothing_while_the_step_lasts_longer():
    base = TierRates(
        bytes_per_s=10**9, record_ns=0, write_bytes_per_s=10**9, write_record_ns=0
    )
    prospect = Prospect(
        boundary=1,
        prefix_ns=1000,
        record_bytes=10**4,  # 10 us
        held=10,
        samples=10,
        passes=9,
        stored_ns=0,
        active_ns=20_000,
    )
    assert not decide(base, prospect).caches
    ahead = dataclasses.replace(base, overlap=1.0)
    assert decide(ahead, prospect).caches and decide(ahead, prospect).read_ns == 0
    short = dataclasses.replace(prospect, active_ns=8_000)  # 2 us of 10 are waited for
    assert not decide(ahead, short).caches


def test_a_decision_names_its_numbers_and_where_it_turns():
    rates = TierRates(
        bytes_per_s=5 * 10**9,
        record_ns=2000,
        write_bytes_per_s=10**9,
        write_record_ns=2000,
    )
    prospect = Prospect(
        boundary=4,
        prefix_ns=1.9e6,
        record_bytes=200_000,
        held=50,
        samples=100,
        passes=9,
        stored_ns=0,
    )
    found = dataclasses.replace(decide(rates, prospect), pays_from=1)
    assert found.text == (
        "cache: read 42.0 us a sample against 1.90 ms recomputed (host 5.0 GB/s "
        "measured): cached for 50 of 100 samples; would turn below 0.096 GB/s, pays "
        "from 1 frozen layer on"
    )
    cheap = decide(rates, dataclasses.replace(prospect, prefix_ns=1000.0))
    assert "recomputed; no rate would turn it, pays for no number" in cheap.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes_per_s", 0), ("record_ns", -1), ("write_bytes_per_s", 0.5), ("overlap", 2)],
)
def test_rates_out_of_range_are_refused(field, value):
    fields = {
        "bytes_per_s": 1,
        "record_ns": 0,
        "write_bytes_per_s": 1,
        "write_record_ns": 0,
    }
    with pytest.raises(ValueError, match=f"{field}: expected"):
        TierRates(**{**fields, field: value})
