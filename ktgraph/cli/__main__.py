"""`python -m ktgraph.cli`."""

import sys

from ktgraph.cli import main

sys.exit(main())
