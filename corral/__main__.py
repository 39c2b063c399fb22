"""`python -m corral` is the `corral` command."""

import sys

from corral.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
