import torch
from torch import nn

import pipetransformer as pt

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 2))
inputs = torch.randn(256, 16)
train_set = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

engine = pt.PipeTransformer(
    model,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    loss=nn.CrossEntropyLoss(),
    freeze=pt.freeze.Guarded(),
)
with engine:
    for epoch in engine.epochs(5):
        for batch in engine.batches(train_set, batch_size=32):  # global batch size
            engine.step(batch)
        metrics = engine.evaluate(
            train_set, {"accuracy": lambda out, y: (out.argmax(1) == y).float()}
        )
        if engine.is_main:
            print(f"epoch {epoch}: {metrics}")
