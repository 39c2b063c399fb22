"""`python -m corral` is the `corral` command."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    # `python -m` puts the working directory first, where any file may have the name of a module.
    sys.path.append(sys.path.pop(0))

from corral.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
