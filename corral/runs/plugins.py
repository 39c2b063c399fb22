"""Callbacks and metric sinks of a run: built-in sinks by name, the user's own as objects, classes or `module:Class`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from corral.core.errors import UserError
from corral.envs.resolve import import_module
from corral.runs.callbacks.base import Callback
from corral.runs.folder import RunFolder
from corral.runs.sinks.base import MetricSink
from corral.runs.sinks.csv import CsvSink
from corral.runs.sinks.tensorboard import TensorBoardSink

CallbackLike = Callback | Callable[[], Callback] | str
SinkLike = MetricSink | Callable[[], MetricSink] | str

BUILT_IN_SINKS: dict[str, Callable[[RunFolder, int | None], MetricSink]] = {
    "csv": lambda folder, purge_after: CsvSink(folder.metrics_csv, purge_after),
    "tensorboard": lambda folder, purge_after: TensorBoardSink(folder.path, purge_after),
}
"""Makes a sink of a run; a resumed run drops rows after the step `purge_after`, which will be written again."""


@dataclass(frozen=True)
class Plugins:
    """Callbacks and sinks of a run. Classes are instantiated in the learner's process."""

    callbacks: tuple[Any, ...] = ()
    sinks: tuple[Any, ...] = ()
    built_in_sinks: tuple[str, ...] = tuple(BUILT_IN_SINKS)

    @classmethod
    def find(cls, callbacks: Any = (), sinks: Any = ()) -> Plugins:
        """Import named plugins, one or many; UserError for anything that is neither a callback nor a sink.

        Naming built-in sinks chooses among them; `metrics.csv`, which other commands read, is always written.
        """
        callbacks, sinks = _listed(callbacks), _listed(sinks)
        named = [sink for sink in sinks if isinstance(sink, str) and sink in BUILT_IN_SINKS]
        others = [sink for sink in sinks if sink not in named]
        return cls(
            tuple(_find(each, Callback, "callback") for each in callbacks),
            tuple(_find(each, MetricSink, "sink") for each in others),
            tuple(named or BUILT_IN_SINKS),
        )

    def make_callbacks(self) -> list[Callback]:
        return [_make(each, Callback, "callback") for each in self.callbacks]

    def make_sinks(self, folder: RunFolder, purge_after: int | None) -> list[MetricSink]:
        """The sinks of a run, its own files first; these lose rows after the step `purge_after`."""
        names = dict.fromkeys(("csv", *self.built_in_sinks))
        return [BUILT_IN_SINKS[name](folder, purge_after) for name in names] + [
            _make(each, MetricSink, "sink") for each in self.sinks
        ]

    def require_portable(self) -> None:
        """UserError if a plugin cannot be sent to the learner's process."""
        for kind, group in (("callback", self.callbacks), ("sink", self.sinks)):
            for each in group:
                try:
                    cloudpickle.dumps(each)
                except Exception as error:
                    raise UserError(
                        f"The {kind} {_name(each)} cannot be sent to the learner process ({error}): give the class "
                        "or module:Class instead of an object, or open files and connections in a hook."
                    ) from error


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)


def _find(given: Any, kind: type[Any], name: str) -> Any:
    found = _import(given, name) if isinstance(given, str) else given
    fits = isinstance(found, kind) or callable(found)
    if isinstance(found, type) and kind is Callback:
        fits = issubclass(found, Callback)
    if not fits:
        raise UserError(f"{given!r} is not a {name}: give a corral.{kind.__name__}, its class, or module:Class.")
    return found


def _import(text: str, name: str) -> Any:
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        names = f", or one of {', '.join(BUILT_IN_SINKS)}" if name == "sink" else ""
        raise UserError(f"{text!r} does not name a {name}: give module:Class{names}.")
    module = import_module(module_name, text)
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, [n for n in dir(module) if not n.startswith("_")], 3)
        hint = f"; close: {', '.join(close)}" if close else ""
        raise UserError(f"Module {module_name!r} has no {attribute!r}{hint}.")
    return getattr(module, attribute)


def _make(found: Any, kind: Any, name: str) -> Any:
    if isinstance(found, kind) and not isinstance(found, type):
        return found
    try:
        inspect.signature(found).bind()
    except ValueError:  # written in C, without a signature
        pass
    except TypeError as error:
        raise UserError(f"The {name} {_name(found)} needs arguments ({error}): give an instance instead.") from error
    made = found()
    if not isinstance(made, kind):
        raise UserError(f"{_name(found)} returned a {type(made).__name__}, which is not a corral.{kind.__name__}.")
    return made


def _name(given: Any) -> str:
    return str(getattr(given, "__qualname__", type(given).__qualname__))
