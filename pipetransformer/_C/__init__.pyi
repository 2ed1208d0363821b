"""Types of the C++ extension, a module per room; checked by stubtest."""

from pipetransformer._C import autocache as autocache
from pipetransformer._C import autodp as autodp
from pipetransformer._C import autofreeze as autofreeze
from pipetransformer._C import core as core
from pipetransformer._C import device as device
from pipetransformer._C import pipe as pipe
from pipetransformer._C import planner as planner
from pipetransformer._C import simulator as simulator
