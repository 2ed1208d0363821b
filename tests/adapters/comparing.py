"""Small models by table, and how far layers are from the model they are made of."""

import copy

import torch

from tests.adapters.hf_models import transformers
from tests.adapters.test_transformers import gradients, pipe_of


def make(table, name, task, dtype=torch.float32, **changes):
    """Return a task model with drawn weights, tables among them, in evaluation mode.

    Args:
        table: By name the values of the config, and by task how its class ends.
        name: Prefix of the classes.
        task: What it is for.
        dtype: Of its weights.
        changes: Of the config.
    """
    values, tasks = table[name]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, name + tasks[task])(config)
    numbers = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in model.parameters():
            if not value.any():
                value.copy_(torch.randn(value.shape, generator=numbers) / 10)
    return model.to(dtype).eval()


def differences(adapted, batch, mode, stages, microbatches=1):
    """Return what differs from the model, by name: the largest difference, as a share.

    Compared are outputs, loss, gradients and buffers, after a step in train mode or in
    evaluation mode.
    """
    model, plain = adapted.model, copy.deepcopy(adapted.model).train(mode)
    adapted.sequential.train(mode)
    for each in (model, plain):
        each.zero_grad()
    expected = plain(**batch)
    expected.loss.backward()
    pipe = pipe_of(adapted, stages, microbatches)
    got = pipe(*adapted.inputs(batch))
    loss = adapted.loss(got, adapted.targets(batch))
    loss.backward()
    pipe.close()
    own, wanted = gradients(model), gradients(plain)
    assert own.keys() == wanted.keys()
    # The engine wants a gradient of everything that trains.
    assert own.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    logits = got[0] if isinstance(got, tuple) else got
    pairs = {"logits": (logits, expected.logits), "loss": (loss, expected.loss)}
    pairs |= {name: (own[name], wanted[name]) for name in wanted}
    buffers = dict(plain.named_buffers())
    pairs |= {n: (value, buffers[n]) for n, value in model.named_buffers()}
    return {
        name: float(((a - b).abs().max() / b.abs().max().clamp(1.0)).detach())
        for name, (a, b) in pairs.items()
        if not torch.equal(a, b)
    }


def check_names(adapted):
    """Assert that states go both ways, and that layers share nothing."""
    model = adapted.model
    ours, theirs = adapted.sequential.state_dict(), model.state_dict()
    back, again = adapted.to_transformers(ours), adapted.from_transformers(theirs)
    assert list(back) == list(theirs) and set(again) == set(ours)
    assert all(back[n].data_ptr() == theirs[n].data_ptr() for n in theirs)
    assert all(again[n].data_ptr() == ours[n].data_ptr() for n in ours)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for what in (*layer.modules(), *layer.parameters(), *layer.buffers()):
            assert seen.setdefault(id(what), index) == index, type(what).__name__
    assert set(map(id, adapted.sequential.parameters())) == set(
        map(id, model.parameters())
    )
