"""Hides from Corral's modules what Windows lacks; everything else, such as pytest and psutil, keeps it.

Python imports this file at its start if its folder is in PYTHONPATH, so that child processes are limited, too. Modules
are refused, functions and constants are missing, /proc and /dev/shm do not exist, sockets cannot gather, and a file
lock is one of Windows. With CORRAL_NO_LINKS symbolic links need a privilege.
"""

import builtins
import errno
import fcntl
import importlib
import os
import pathlib
import socket
import sys
import types

MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
NAMES = {
    "faulthandler": {"register", "unregister"},
    "os": {
        "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "fchmod", "fchown", "fdatasync", "fork",
        "forkpty", "geteuid", "getgid", "getloadavg", "getpgid", "getpgrp", "getuid", "killpg", "memfd_create",
        "mkfifo", "nice", "posix_fadvise", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "readv",
        "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile", "setpgid", "setsid",
        "statvfs", "sysconf", "uname", "wait", "waitid", "writev",
    },
    "select": {"poll", "epoll", "kqueue"},
    "signal": {
        "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2",
        "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait",
    },
    "socket": {"AF_UNIX", "SCM_RIGHTS", "SO_REUSEPORT", "TCP_USER_TIMEOUT", "recv_fds", "send_fds", "socketpair"},
}  # fmt: skip
FILES = ("/proc", "/sys/fs/cgroup", "/dev/shm", "/bin/")


def _loopback_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class _Limited(types.ModuleType):
    """A module without the names that are hidden."""

    def __init__(self, module):
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name):
        module = self._module
        hidden = name in NAMES[module.__name__] or (module.__name__ == "select" and name.startswith(("POLL", "EPOLL")))
        if name == "socketpair":
            return _loopback_pair
        if hidden:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}, as on Windows")
        return getattr(module, name)


class _Msvcrt:
    """Windows' locks by those of Linux: of bytes from the file's position."""

    LK_UNLCK, LK_LOCK, LK_NBLCK = range(3)

    @staticmethod
    def locking(fd, mode, nbytes):
        how = fcntl.LOCK_UN if mode == _Msvcrt.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(fd, how, nbytes, 0, os.SEEK_CUR)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, nbytes, 0, os.SEEK_CUR)  # a file that is only read


_limited = {}
_import, _import_module, _symlink_to = builtins.__import__, importlib.import_module, pathlib.Path.symlink_to


def _is_corral(name):
    return name == "corral" or name.startswith("corral.")


def _limit(name, *args, **kwargs):
    module = _import(name, *args, **kwargs)
    scope = args[0] if args else kwargs.get("globals")
    if scope and _is_corral(scope.get("__name__") or ""):
        return _seen_by_corral(name, module)
    return module


def _seen_by_corral(name, module=None):
    if name in MODULES:
        raise ImportError(f"no module {name}, as on Windows")
    if name in NAMES:
        if name not in _limited:
            _limited[name] = _Limited(module or _import_module(name))
        return _limited[name]
    return module


def _limit_module(name, package=None):
    if _is_corral(sys._getframe(1).f_globals.get("__name__", "")):
        if name == "msvcrt":
            return _Msvcrt
        if name in MODULES or name in NAMES:
            return _seen_by_corral(name)
    return _import_module(name, package)


def _refuse_link(self, *args, **kwargs):
    if _is_corral(sys._getframe(1).f_globals.get("__name__", "")):
        raise OSError(1314, "A required privilege is not held by the client")
    return _symlink_to(self, *args, **kwargs)


def _audit(event, args):
    if event not in ("open", "os.scandir", "subprocess.Popen") or not isinstance(args[0], str):
        return
    if args[0].startswith(FILES):
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("pathlib", "io", "subprocess", "os", "glob", "fnmatch"):
            frame = frame.f_back
        if frame and _is_corral(frame.f_globals.get("__name__", "")):
            raise FileNotFoundError(2, "No such file or directory, as on Windows", args[0])


def _sendmsg_of(self):
    if _is_corral(sys._getframe(1).f_globals.get("__name__", "")):
        raise AttributeError("no sendmsg, as on Windows")
    return super(socket.socket, self).sendmsg


builtins.__import__, importlib.import_module = _limit, _limit_module
if "CORRAL_NO_LINKS" in os.environ:
    pathlib.Path.symlink_to = _refuse_link
socket.socket.sendmsg = property(_sendmsg_of)
sys.addaudithook(_audit)
