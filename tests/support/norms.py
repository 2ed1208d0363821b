"""References and cases of the ops on norms, shared by CPU and CUDA tests."""

import torch

OPS = {"squared_norms": lambda t: t.square(), "l1_norms": lambda t: t.abs()}


def reference(name, tensors):
    return torch.tensor(
        [OPS[name](t.detach().cpu().double()).sum().item() for t in tensors],
        dtype=torch.float64,
    )


def mixed_case(device):
    """All dtypes, sizes around every block limit, strides, zero sizes."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for size in (0, 1, 7, 8, 9, 255, 257, 20000):
        for dtype in dtypes:
            tensor = torch.randn(size, generator=generator).to(dtype)
            tensors.append(tensor.to(device))
    wide = torch.randn(6, 10, generator=generator).to(device)
    tensors += [wide.t(), wide[::2, 1::3], wide[0, 0], wide[:, :0]]
    return tensors
