"""gRPC as Corral uses it, for workers that dial in (`envs.grpc_vec`) and for the link (`link.grpc`)."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from corral.core.errors import UserError

MOST_BYTES = 1 << 30  # of a message
_PING_MS, _PONG_MS = 10_000, 20_000


def import_grpc() -> Any:
    """The grpc package; UserError when it is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said in our own words
    try:
        return importlib.import_module("grpc")
    except ModuleNotFoundError as error:
        raise UserError("gRPC is not installed: pip install 'corral-rl[grpc]'.") from error


def options(first_retry_ms: int, longest_retry_ms: int) -> tuple[tuple[str, int], ...]:
    """Of channels and servers; a connection that failed is tried again after so long, at first and at most."""
    return (
        ("grpc.max_send_message_length", MOST_BYTES),
        ("grpc.max_receive_message_length", MOST_BYTES),
        # A machine that is switched off, or a cable that is pulled, says nothing: ask.
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", _PONG_MS),
        ("grpc.http2.ping_timeout_ms", _PONG_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),  # what the other side may do
        ("grpc.initial_reconnect_backoff_ms", first_retry_ms),
        ("grpc.min_reconnect_backoff_ms", longest_retry_ms),  # in truth how long to try
        ("grpc.max_reconnect_backoff_ms", longest_retry_ms),
        ("grpc.so_reuseport", 0),  # otherwise two could listen on one port, and get half of the calls each
        ("grpc.enable_http_proxy", 0),  # the other side is near, the proxy is for the world outside
    )


class Threads(futures.Executor):
    """A thread for each call, which gRPC bounds; Python's own pool would wait for them at exit, for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Call it now."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
