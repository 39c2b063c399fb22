"""The exchange that a `DataParallelConfig` describes."""

from __future__ import annotations

import importlib
from typing import Any

from corral.core.errors import UserError
from corral.learn.exchange.base import ExchangeSetup, Joint
from corral.learn.exchange.config import EXCHANGES


def find_exchange(name: str) -> Any:
    """The class of the exchange of that name, or of `module:Class`."""
    module, _, class_name = EXCHANGES.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"No exchange {name!r}: {error}; give one of {', '.join(EXCHANGES)}, or module:Class."
        ) from None


def make_exchange(setup: ExchangeSetup) -> Joint:
    """One learner's side of the exchange."""
    made: Joint = find_exchange(setup.config.exchange).make(setup)
    return made
