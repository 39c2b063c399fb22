"""A role in its own process: runs calls in order; a thread reads, so callers never wait and the mailbox is current."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import threading
import time
from typing import Any

import cloudpickle

from corral.core.encoding import Buffer, decode, encode
from corral.core.portable import survive_realtime_signals
from corral.runtimes import process as frames
from corral.runtimes.base import Mailbox, RoleHost, failure
from corral.runtimes.connection import Connection, ConnectionClosed
from corral.runtimes.shared_memory import SharedMemory

_ALIVE_S = 1.0


def main(sock: socket.socket, job: SharedMemory) -> None:
    """Serve one handle until it sends CLOSE or disconnects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    survive_realtime_signals()
    logging.getLogger("corral").setLevel(logging.WARNING)  # informational messages of many processes are noise
    logging.getLogger("corral").propagate = False  # printed as usual, even if a package sets up logging
    connection = Connection(sock, None)
    mailbox = Mailbox()
    calls: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()  # bounded by the waiting callers
    threading.Thread(target=_read, args=(connection, mailbox, calls), daemon=True).start()
    threading.Thread(target=_send_heartbeats, args=(connection,), daemon=True).start()
    with contextlib.suppress(ConnectionClosed):
        _serve(connection, mailbox, calls, job)


def _serve(
    connection: Connection, mailbox: Mailbox, calls: queue.SimpleQueue[tuple[int, Any] | None], job: SharedMemory
) -> None:
    # Pickle is safe here: the bytes come from the process that started this one, in its own memory, and a recipe for a
    # role is code, which no data format carries.
    host = RoleHost(lambda: cloudpickle.loads(job.read())(mailbox))
    # Bounded by the waiting calls, as calls are.
    answers: queue.SimpleQueue[tuple[int, list[Buffer]] | None] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(connection, answers), daemon=True)
    sender.start()
    try:
        while (call := calls.get()) is not None:
            number, (method, args) = call
            answers.put((number, _encoded(host.answer(method, args))))
    finally:
        answers.put(None)
        host.close()
        sender.join()


def _send(connection: Connection, answers: queue.SimpleQueue[tuple[int, list[Buffer]] | None]) -> None:
    """Send answers while the role continues: a busy parent reads large ones later."""
    with contextlib.suppress(ConnectionClosed):
        while (answer := answers.get()) is not None:
            connection.send(frames.ANSWER, *answer)


def _encoded(answer: dict[str, Any]) -> list[Buffer]:
    try:
        return encode(answer)
    except Exception as error:  # a value that cannot be sent
        return encode(failure(error))


def _read(connection: Connection, mailbox: Mailbox, calls: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
    with contextlib.suppress(ConnectionClosed):
        while (frame := connection.read(wait=True)) is not None:
            kind, number, body = frame
            if kind == frames.CLOSE:
                break
            value = decode(body)
            if kind == frames.CALL:
                calls.put((number, value))
            else:
                mailbox.put(*value)
    mailbox.close()
    calls.put(None)


def _send_heartbeats(connection: Connection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while not connection.closed:
            connection.send(frames.ALIVE, 0)
            time.sleep(_ALIVE_S)
