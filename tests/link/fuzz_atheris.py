"""Atheris, which looks for inputs that reach new code, into one decoder; the rest of the line is libFuzzer's.

    python tests/link/fuzz_atheris.py NAME FOLDER -max_total_time=60

FOLDER keeps the inputs that it finds. It is no dependency: there are wheels for some Pythons only (`pip install
atheris`). `make fuzz` uses it if it is there.
"""

import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["corral", "helpers.decoders"]):
    from helpers.decoders import DECODERS


def main():
    """Begin with what the decoder likes."""
    logging.disable(logging.CRITICAL)
    program, name, folder, *options = sys.argv
    make, good = DECODERS[name]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(good()):
        Path(folder, f"good_{number}").write_bytes(data)
    atheris.Setup([program, folder, *options], make())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
