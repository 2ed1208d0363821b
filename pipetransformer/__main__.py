"""``python -m pipetransformer``: the command line."""

import sys

from pipetransformer.cli.main import main

sys.exit(main())
