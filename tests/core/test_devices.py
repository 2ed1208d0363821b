"""Moving modules from device to device."""

from unittest import mock

import torch
from torch import nn

from pipetransformer.core.devices import move_modules


def test_recurrent_layers_have_their_weights_put_together_again():
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    with mock.patch.object(nn.LSTM, "flatten_parameters") as put_together:
        move_modules(model, torch.device("cpu"))
    put_together.assert_called_once_with()
