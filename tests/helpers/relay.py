"""A TCP relay between a learner and a simulator that tests can cut."""

import contextlib
import select
import socket
import threading


class Relay:
    """Listens, and passes everything on to `target`, until `cut`; who dials again afterwards gets through again."""

    def __init__(self, target):
        host, port = target.rpartition("://")[2].split(":")
        self._target = host, int(port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"{target.partition('://')[0]}://127.0.0.1:{self._door.getsockname()[1]}"
        self._pairs = []
        self._stop = False
        self.passed = 0
        self._cut_after = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, after_bytes=0):
        """Cut all connections once so many more bytes have passed: in the middle of a message, if that is odd."""
        self._cut_after = self.passed + after_bytes

    def close(self):
        self._stop = True
        self._thread.join(5)
        self._door.close()

    def _run(self):
        while not self._stop:
            if self._cut_after is not None and self.passed >= self._cut_after:
                self._cut_after = None
                self._drop()
            sockets = [self._door, *(s for pair in self._pairs for s in pair)]
            for sock in select.select(sockets, [], [], 0.005)[0]:
                if sock is self._door:
                    self._accept()
                else:
                    self._pass_on(sock)
        self._drop()

    def _accept(self):
        here, _ = self._door.accept()
        try:
            there = socket.create_connection(self._target, 2)
        except OSError:
            here.close()
            return
        self._pairs.append((here, there))

    def _pass_on(self, sock):
        pair = next((pair for pair in self._pairs if sock in pair), None)
        if pair is None:
            return
        other = pair[0] if sock is pair[1] else pair[1]
        limit = 1 << 16 if self._cut_after is None else max(1, self._cut_after - self.passed)
        try:
            data = sock.recv(min(limit, 1 << 16))
            if data:
                other.sendall(data)
        except OSError:
            data = b""
        self.passed += len(data)
        if not data:
            self._pairs.remove(pair)
            for each in pair:
                each.close()

    def _drop(self):
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
        self._pairs.clear()
