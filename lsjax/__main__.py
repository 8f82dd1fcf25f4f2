"""``python -m lsjax``: the same as the ``lsjax`` command."""

import sys

from lsjax.cli import main

sys.exit(main())
