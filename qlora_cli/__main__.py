"""`python -m qlora_cli` is `qlora`."""

import sys

from qlora_cli.cli import main

sys.exit(main())
