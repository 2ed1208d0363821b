"""What forked processes find loaded; see `forked`. Starts no thread."""

import torch
import torch._dynamo  # DistributedDataParallel asks for it at its first use
import torch.distributed
import torch.nn.parallel
import torch.optim
import torch.utils.data

import pipetransformer
import pipetransformer.engine

LOADED = (torch.__version__, pipetransformer.__name__)
