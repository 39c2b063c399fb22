"""Names of the contestants from which layers and targets are computed."""

from __future__ import annotations

from corral.core.machine import cores

SYNC, ASYNC = "gymnasium Sync", "gymnasium Async"
BARE_ONE, BARE_ALL = "bare loop, 1 process", f"bare loop, {cores()} processes"
BARE_LOCKSTEP = f"bare loop, {cores()} processes, lockstep"
GROUP_ONE, GROUP_ALL = "group loop, 1 process", f"group loop, {cores()} processes"
LOCAL, LOCAL_SAMPLER = "corral local", "corral Sampler on local"
LOCKSTEP, FIRST, HALVES = "corral process, lockstep", "corral process, first ready", "corral process, halves"
SAMPLER, NATIVE, PROCESS = "corral Sampler on process", "corral native", "corral process"
ALE = "ALE vector"
