"""Wrappers that only look on."""

from __future__ import annotations

from typing import Any

import gymnasium


class Onlooker(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Changes nothing and remembers nothing, so that planners may do as if it were not there."""
