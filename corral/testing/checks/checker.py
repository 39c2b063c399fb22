"""Checks that an environment conforms to the Gymnasium API, and shows how Corral will handle it.

```python
for result in corral.testing.check_env("my_package.my_env:MyEnv"):
    print(result.status, result.name, result.detail)
```
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.core.errors import UserError
from corral.core.gym_env import explain
from corral.envs.backends.simulators.options import is_url
from corral.envs.resolve import EnvLike
from corral.testing.checks.env import CHECKS, FOUNDATIONS, Outcome, Status, Subject
from corral.testing.checks.link import LINK_CHECKS, LinkSubject
from corral.testing.checks.states import STATE_CHECKS

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FROM_SWIG = re.compile(r"builtin type \w+ has no __module__ attribute")  # of Box2D's bindings, when they are imported


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check: `fail`: violates the API; `warn`: works, but should be reviewed."""

    name: str
    status: Status
    detail: str
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of external simulators


def check_env(
    env: EnvLike, *, env_kwargs: Mapping[str, Any] | None = None, steps: int = 1000, seed: int = 0
) -> list[CheckResult]:
    """Check an environment, given by Gymnasium id, `module:Class` or factory, or the simulator at a URL.

    Args:
        env: as in `corral.make_vec`.
        env_kwargs: keyword arguments for the environment.
        steps: number of random steps; more of them see more ends of episodes.
        seed: of the environment and of the random actions.

    Returns one result per check, fewer if a check fails that all later ones depend on. UserError if there is no such
    environment.
    """
    return list(iter_checks(env, env_kwargs=env_kwargs, steps=steps, seed=seed))


def iter_checks(
    env: EnvLike, *, env_kwargs: Mapping[str, Any] | None = None, steps: int = 1000, seed: int = 0
) -> Iterator[CheckResult]:
    """The results of `check_env`, each as soon as it is available."""
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}.")
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}.")
    kwargs = dict(env_kwargs or {})
    external = isinstance(env, str) and is_url(env)
    subject: Any = LinkSubject(str(env), kwargs, steps, seed) if external else Subject(env, kwargs, steps, seed)
    checks: Mapping[str, Callable[[Any], Outcome]] = LINK_CHECKS if external else {**CHECKS, **STATE_CHECKS}
    warnings_seen: list[str] = []
    try:
        for name, check in checks.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                status, detail = _run(name, check, subject)
            texts = [_COLOUR.sub("", str(w.message)).strip().removeprefix("WARN: ") for w in caught]
            warnings_seen += [text for text in texts if not _FROM_SWIG.match(text)]
            yield CheckResult(name, status, detail, subject.facts if external else {})
            if status == "fail" and name in FOUNDATIONS:
                return
        if warnings_seen:
            yield CheckResult("its warnings", "warn", "; ".join(list(dict.fromkeys(warnings_seen))[:3]))
    finally:
        subject.close()


def _run(name: str, check: Callable[[Any], Outcome], subject: Any) -> Outcome:
    try:
        return check(subject)
    except UserError as error:
        if name in ("build", "connect"):
            raise
        return "fail", str(error)
    except (Exception, SystemExit) as error:
        return "fail", explain(error)
