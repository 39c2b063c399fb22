"""Hides from Corral's modules what Windows lacks; everything else, such as pytest and psutil, keeps it.

Python imports this file at its start if its folder is in PYTHONPATH, so that child processes are limited, too. Modules
are refused, functions and constants are missing, /proc and /dev/shm do not exist, sockets cannot gather, a file lock is
one of Windows, and open files can be neither removed nor renamed. With CORRAL_NO_LINKS symbolic links need a privilege.
"""

import builtins
import contextlib
import errno
import fcntl
import importlib
import os
import pathlib
import socket
import stat
import struct
import sys
import types

MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
NAMES = {
    "ctypes": set(),
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
PASS_ON = {"contextlib", "fnmatch", "glob", "io", "os", "pathlib", "shutil", "subprocess", "tempfile"}
FILES = ("/proc", "/sys/fs/cgroup", "/dev/shm", "/bin/")


def _loopback_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class _Windll:
    """What Windows tells about the machine, by what Linux does."""

    class kernel32:
        @staticmethod
        def GlobalMemoryStatusEx(status):
            lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
            found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
            status._obj.total, status._obj.available = found["MemTotal"], found["MemAvailable"]
            return status._obj.length == 64

        @staticmethod
        def GetSystemTimes(idle, kernel, user):
            fields = pathlib.Path("/proc/stat").read_text().split(None, 6)
            idle._obj.value = 10_000_000 * (int(fields[4]) + int(fields[5])) // os.sysconf("SC_CLK_TCK")
            return 1


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
        if (module.__name__, name) == ("ctypes", "windll"):
            return _Windll
        if hidden:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}, as on Windows")
        return getattr(module, name)

    def __reduce__(self):
        return _seen_by_corral, (self.__name__,)  # it is limited in other processes, too


class _Msvcrt:
    """Windows' locks by those of Linux: of bytes from the file's position, against everyone who has opened it, too."""

    LK_UNLCK, LK_LOCK, LK_NBLCK = range(3)

    @staticmethod
    def locking(fd, mode, nbytes):
        writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        how = fcntl.F_UNLCK if mode == _Msvcrt.LK_UNLCK else fcntl.F_WRLCK if writes else fcntl.F_RDLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", how, os.SEEK_CUR, 0, nbytes, 0))


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
    if event in ("open", "os.scandir", "subprocess.Popen"):
        if isinstance(args[0], str) and args[0].startswith(FILES) and _corral_asks():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory, as on Windows", args[0])
    elif event in ("os.remove", "os.rename", "os.rmdir") and _corral_asks():
        for path in args[:2] if event == "os.rename" else args[:1]:
            _require_closed(os.fsdecode(path), args[-1])


def _corral_asks():
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__") in PASS_ON:
        frame = frame.f_back
    return frame is not None and _is_corral(frame.f_globals.get("__name__", ""))


def _require_closed(path, folder):
    """Windows removes or renames no file that is open or mapped, and renames no folder with such a file."""
    if os.path.basename(path).startswith("corral-memory-"):  # no file on Windows
        return
    path = os.path.join("" if folder == -1 else os.readlink(f"/proc/self/fd/{folder}"), path)
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    with open("/proc/self/maps") as maps:
        found = {line.split(None, 5)[-1].rstrip("\n") for line in maps}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.stat(f"/proc/self/fd/{fd}").st_mode):  # rmtree holds folders
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    for name in found:
        if name == path or name.startswith(f"{path}/"):
            raise PermissionError(errno.EACCES, "The process cannot access the file because it is open", name)


def _sendmsg_of(self):
    if _is_corral(sys._getframe(1).f_globals.get("__name__", "")):
        raise AttributeError("no sendmsg, as on Windows")
    return super(socket.socket, self).sendmsg


for imitation in (_limit, _limit_module, _refuse_link):  # in tracebacks, a place that is not the user's
    imitation.__code__ = imitation.__code__.replace(co_filename="<no_linux>")
builtins.__import__, importlib.import_module = _limit, _limit_module
if "CORRAL_NO_LINKS" in os.environ:
    pathlib.Path.symlink_to = _refuse_link
socket.socket.sendmsg = property(_sendmsg_of)
sys.addaudithook(_audit)
