"""Modules that a user names: `module:Class` finds those of the working directory too, after all installed ones."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_named(module: str) -> Any:
    """Import a module that a user named. Only if it is not installed is the working directory searched, as the last."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != module.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as again:
            if again.name == error.name:
                sys.path.remove(here)
            raise
