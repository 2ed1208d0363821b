"""What is done again and again takes a small share of the time."""

from pipetransformer.report import Throttle


def test_the_first_time_it_is_due():
    assert Throttle().is_due(0.0) and Throttle().is_due(-5.0)


def test_it_rests_ten_times_as_long_as_it_took():
    throttle = Throttle()
    throttle.note(100.0, 102.0)
    assert not throttle.is_due(102.0) and not throttle.is_due(121.9)
    assert throttle.is_due(122.0)
    throttle.note(122.0, 122.5)
    assert not throttle.is_due(127.4) and throttle.is_due(127.5)


def test_it_takes_less_than_a_tenth_of_the_time_however_it_grows():
    throttle, now, spent, times = Throttle(), 0.0, 0.0, 0
    while now < 1000.0:
        if throttle.is_due(now):
            times += 1
            took = 0.001 * now  # what is written grows with the run
            throttle.note(now, now + took)
            now, spent = now + took, spent + took
        now += 0.1  # a pass
    assert times > 100 and spent < now / 10


def test_what_takes_no_time_is_always_due():
    throttle = Throttle()
    throttle.note(3.0, 3.0)
    assert throttle.is_due(3.0)
