"""`corral serve` as a process of this machine."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil


class Served:
    """A `corral serve` command that connects to a learner, and what it wrote."""

    def __init__(self, env, url, *options):
        command = [sys.executable, "-m", "corral.cli.main", "serve", env, "--connect", url, *map(str, options)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        self._text = None

    def workers(self):
        """The processes that its environments are in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "corral.envs.serve.child" in " ".join(child.cmdline())]
        return []

    def wait(self, timeout_s=20):
        """Its exit code, once it has ended by itself."""
        self._text = self.process.communicate(timeout=timeout_s)[1]
        return self.process.returncode

    def kill(self):
        """End the command as `kill -9` does."""
        self.process.kill()
        self.wait()

    def end(self):
        """Interrupt it, and end it if that is not enough."""
        if self._text is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def text(self):
        """What it wrote to stderr, after its end."""
        self.end()
        return self._text
