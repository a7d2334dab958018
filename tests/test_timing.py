import itertools

import pytest

from meshslice_jax.timing import Samples, interleaved


class FakeClock:
    """Stands still except where a call moves it on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


def test_every_round_calls_each_candidate_once_from_another_start():
    clock, order = FakeClock(), []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    interleaved(calls, 3, clock=clock, wait=lambda x: x)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_times_are_those_of_the_call_and_of_waiting_for_its_result():
    clock = FakeClock()
    durations = itertools.cycle([1.0, 4.0, 2.0])
    calls = {"only": lambda: clock.work(next(durations))}
    samples = interleaved(calls, 3, clock=clock, wait=lambda x: clock.work(0.5))["only"]
    assert samples.seconds == (1.5, 4.5, 2.5)
    assert (samples.median_s, samples.min_s, samples.max_s) == (2.5, 1.5, 4.5)


def test_ratios_are_formed_within_a_round_before_their_median():
    ours, base = Samples((2.0, 30.0, 6.0)), Samples((1.0, 10.0, 4.0))
    assert ours.ratio_to(base) == 2.0  # of 2, 3 and 1.5; the ratio of the medians is 1.5


def test_no_candidates_give_no_samples():
    assert interleaved({}, 2) == {}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        interleaved({}, 0)
