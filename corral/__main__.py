"""`python -m corral` is the `corral` command."""

from corral.cli.main import main

if __name__ == "__main__":
    main()
