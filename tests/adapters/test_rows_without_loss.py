"""Parts of a batch in which no row counts: a loss of 0, and no NaN."""

import pytest
import torch

from pipetransformer.adapters import from_transformers
from tests.adapters.hf_models import make_batch, make_model

CASES = [
    ("Bert", "question-answering", ("start_positions", "end_positions"), 99),
    ("Bert", "sequence-classification", ("labels",), -100),
    ("DebertaV2", "sequence-classification", ("labels",), -1),
    ("Bert", "multiple-choice", ("labels",), -100),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("name", "task", "names", "ignored"), CASES)
def test_rows_that_do_not_count_are_left_out(name, task, names, ignored, whole):
    model = make_model(name, task)
    adapted, batch = from_transformers(model), dict(make_batch(task))
    for target in names:
        batch[target] = batch[target].clone()
        batch[target][None if whole else 0] = ignored
    outputs = model(**{k: v for k, v in batch.items() if k not in names})
    found = (
        (outputs.start_logits, outputs.end_logits)
        if len(names) > 1
        else (outputs.logits)
    )
    loss = adapted.loss(found, adapted.targets(batch))
    if whole:
        assert loss == 0.0
    else:
        torch.testing.assert_close(loss, model(**batch).loss)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)
