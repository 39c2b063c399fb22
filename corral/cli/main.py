"""The `corral` command: find and import the command, parse its options, run it, and turn errors into exit codes."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from corral.core.errors import EnvFailed, RunFailed, Terminated, UserError
from corral.core.log import own_format
from corral.core.portable import STOP_SIGNALS

Commands = Mapping[str, tuple[str, str]]
"""Name of a command -> where its dataclass is, and what it does."""

COMMANDS: Commands = {
    "bench": ("corral.cli.bench:Bench", "measure the step rate of an environment or simulator, and its bottleneck"),
    "check-env": ("corral.cli.check_env:CheckEnv", "check that an environment conforms to the Gymnasium API"),
    "doctor": ("corral.cli.doctor:Doctor", "show hardware and installed packages, and what will be slow"),
    "eval": ("corral.cli.eval:Eval", "evaluate the policy of a run"),
    "export": ("corral.cli.export:Export", "export a run's policy as ONNX or TorchScript"),
    "list algos": (
        "corral.cli.list:ListAlgos",
        "list the algorithms, their action spaces, and where they are verified",
    ),
    "list envs": ("corral.cli.list:ListEnvs", "list the environments that can be used by id"),
    "list presets": ("corral.cli.list:ListPresets", "list the default settings of an algorithm on an environment"),
    "plot": ("corral.cli.plot:Plot", "plot the learning curves of one or several runs"),
    "record": ("corral.cli.record:Record", "record a video of a run's policy"),
    "resume": ("corral.cli.resume:Resume", "continue a run from its last checkpoint"),
    "serve": ("corral.cli.serve:Serve", "serve an environment to learners on this machine or others"),
    "state-server": (
        "corral.cli.state_server:StateServerCommand",
        "store simulator states for many clients, in memory or in a folder",
    ),
    "top": ("corral.cli.top:Top", "watch a run: progress, speed, returns, restarts"),
    "train": ("corral.cli.train:Train", "train an agent"),
}


def main(argv: Sequence[str] | None = None, commands: Commands = COMMANDS, prog: str = "corral") -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 user error, 130 interrupted, 143 ended by SIGTERM."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # on Windows a pipe has few characters
        sys.stdout.reconfigure(errors="replace")
    try:
        with _sigterm_unwinds(), own_format():
            return _dispatch(list(sys.argv[1:] if argv is None else argv), commands, prog)
    except (UserError, EnvFailed, RunFailed) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except MemoryError:
        print(f"{prog}: Not enough memory: lower num_envs, num_steps or buffer_size.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except Terminated as signalled:
        return signalled.code
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and Ctrl-Break into an exception, so that commands without a handler clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    # Those that are ignored, as SIGHUP after `nohup`, stay so.
    handled = [n for n in STOP_SIGNALS if n != signal.SIGINT and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dispatch(argv: list[str], commands: Commands, prog: str) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(commands, prog))
        return 0
    if argv[0] in ("-V", "--version"):
        from corral import __version__

        print(f"corral {__version__}")
        return 0
    name, options = _split(argv, commands, prog)
    module_name, _, class_name = commands[name][0].partition(":")
    from corral.cli.options import parse

    command = parse(getattr(importlib.import_module(module_name), class_name), options, f"{prog} {name}")
    code: int = command.run()
    if sys.stdout is not None:  # closed from the start
        sys.stdout.flush()  # here, so that a closed pipe is noticed before Python exits
    return code


def _split(argv: list[str], commands: Commands, prog: str) -> tuple[str, list[str]]:
    for count in (2, 1):
        name = " ".join(argv[:count])
        if name in commands:
            return name, argv[count:]
    family = [name.partition(" ")[2] for name in commands if name.startswith(f"{argv[0]} ")]
    if family and (len(argv) == 1 or argv[1].startswith("-")):
        if argv[1:] in (["-h"], ["--help"]):
            print(_help(commands, prog, argv[0]))
            raise SystemExit(0)
        raise UserError(f"`{prog} {argv[0]}` needs a subcommand: {', '.join(family)}.")
    typed = " ".join(argv[:2]) if family else argv[0]
    names = [*commands, *{name.partition(" ")[0] for name in commands}]
    close = difflib.get_close_matches(" ".join(argv[:2]), names, 1) or difflib.get_close_matches(typed, names, 1)
    hint = f"did you mean `{prog} {close[0]}`?" if close else f"`{prog} --help` lists the commands."
    if typed == "join":
        hint = f"`{prog} serve ENV --connect URL` connects environments to a learner."
    raise UserError(f"No command {typed!r}; {hint}")


def _help(commands: Commands, prog: str, family: str = "") -> str:
    rows = "\n".join(f"  {name:<16} {what}" for name, (_, what) in commands.items() if name.startswith(family))
    more = f"`{prog} COMMAND --help` shows the options of a command, `{prog} --version` the version."
    return f"usage: {prog} COMMAND [OPTIONS]\n\n{rows}\n\n{more}"


if __name__ == "__main__":
    sys.exit(main())
