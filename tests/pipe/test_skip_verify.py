"""Declarations that do not fit together, by their texts."""

import pytest
from torch import nn

from pipetransformer.pipe.skip import Namespace, verify_skippables
from pipetransformer.skip.layout import inspect_lanes

from .skips import Pop, Stash, declares

NO_POP = "no module declared '{}' as poppable but stashed"


def refused(module):
    with pytest.raises(TypeError) as caught:
        verify_skippables(module)
    return str(caught.value).splitlines()[1:]


def test_fitting_pairs_are_accepted():
    verify_skippables(nn.Sequential())
    verify_skippables(nn.Sequential(nn.Linear(2, 2)))
    verify_skippables(nn.Sequential(Stash(), nn.ReLU(), Pop()))
    chain = nn.Sequential(declares("a"), declares("b", "a"), declares((), "b"))
    verify_skippables(chain)


def test_crossing_pairs_in_namespaces_are_accepted():
    a, b = Namespace(), Namespace()
    verify_skippables(
        nn.Sequential(
            Stash().isolate(a), Stash().isolate(b), Pop().isolate(a), Pop().isolate(b)
        )
    )
    verify_skippables(
        nn.Sequential(Stash(), Stash().isolate(a), Pop().isolate(a), Pop())
    )


def test_both_ways_in_one_layer_are_refused():
    assert refused(nn.Sequential(declares("x", "x"))) == [
        "* '0' declared 'x' both as stashable and as poppable"
    ]


def test_second_stash_is_refused():
    assert refused(nn.Sequential(declares("x"), declares("x"), declares((), "x"))) == [
        "* '1' redeclared 'x' as stashable"
    ]


def test_second_pop_is_refused():
    layers = nn.Sequential(declares("x"), declares((), "x"), declares((), "x"))
    assert refused(layers) == ["* '2' redeclared 'x' as poppable"]


def test_pop_without_stash_is_refused():
    assert refused(nn.Sequential(declares((), "x"))) == [
        "* '0' declared 'x' as poppable but it was not stashed"
    ]


def test_stash_without_pop_is_refused():
    assert refused(nn.Sequential(declares("x"))) == ["* " + NO_POP.format("x")]


def test_pop_before_stash_is_refused():
    assert refused(nn.Sequential(Pop(), Stash())) == [
        "* '0' declared 'skip' as poppable but it was not stashed"
    ]


def test_different_namespaces_do_not_meet():
    ns = Namespace()
    assert refused(nn.Sequential(Stash().isolate(ns), Pop())) == [
        "* '1' declared 'skip' as poppable but it was not stashed",
        "* " + NO_POP.format("skip"),
    ]


def test_all_findings_come_in_one_error_by_child_name():
    layers = nn.Sequential()
    layers.add_module("first", declares(["x", "y"], "x"))
    layers.add_module("second", declares("y", "z"))
    layers.add_module("third", declares("w", "z"))
    assert refused(layers) == [
        "* 'first' declared 'x' both as stashable and as poppable",
        "* 'second' redeclared 'y' as stashable",
        "* 'second' declared 'z' as poppable but it was not stashed",
        "* 'third' redeclared 'z' as poppable",
        "* " + NO_POP.format("w"),
        "* " + NO_POP.format("y"),
    ]


def test_pairs_inside_inner_sequentials_are_checked():
    broken = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Sequential(Stash()), nn.ReLU()))
    assert refused(broken) == ["* " + NO_POP.format("skip")]
    twice = nn.Sequential(nn.Sequential(Stash(), Stash()), nn.Sequential(Pop()))
    assert refused(twice) == ["* '0.1' redeclared 'skip' as stashable"]
    verify_skippables(nn.Sequential(nn.Sequential(Stash()), nn.Sequential(Pop())))


class Block(nn.Module):
    """Calls its layers in its own order."""

    def __init__(self):
        super().__init__()
        self.last = Pop()
        self.first = Stash()


def test_a_pair_inside_another_module_fits_in_any_order():
    verify_skippables(nn.Sequential(Block()))
    assert refused(nn.Sequential(Block(), Pop())) == [
        "* '1' declared 'skip' as poppable but it was not stashed",
        "* '0' has a pair 'skip' that others declare, too",
    ]
    verify_skippables(nn.Sequential(Block(), Block()))
    assert inspect_lanes([Block(), Block()]) == ()
