"""Which passes a rank closes."""

from types import SimpleNamespace
from unittest import mock

import pytest

from pipetransformer.pass_loop import PassLoop


@pytest.fixture
def passes():
    run = mock.MagicMock()
    run.state = SimpleNamespace(epoch=2, batch=0)
    made = PassLoop.__new__(PassLoop)
    made._run, made._survivors = run, mock.MagicMock()
    made._role, made._boundaries = SimpleNamespace(stands_by=False), mock.Mock()
    made._left_open = False
    made._open = SimpleNamespace(counted=object(), drop=mock.Mock())
    return made


def test_a_pass_that_a_recovery_gave_is_left_open_until_the_script_begins_it(passes):
    # The others are in its first step: closing it would meet them in another call.
    passes._last_epoch = 1
    passes.finish()
    assert not passes._survivors.call.called and not passes._open.drop.called


def test_a_pass_that_the_script_has_left_is_closed(passes):
    passes._last_epoch = 2
    passes._survivors.call.return_value = None
    passes.finish()
    assert passes._survivors.call.call_args.args == ("close", passes._close)
    assert passes._open.drop.called
