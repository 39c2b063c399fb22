"""Environments in worker processes, several in each; observations and actions in shared memory.

      caller's process                          worker process (fresh interpreter, runtimes/child.py)
   vec_env.py  ProcessVecEnv                 child.py   main(): serve until CLOSE or the parent is gone
     | send/recv, replace lost workers         | step(ids)
     | WorkerHandle: start, report, kill     ../remote/worker.py -> stepping/group.py -> gymnasium.Env.step
     |                                         |
   channel.py  STEP ids  ------------------> channel.py
               <------------------ READY ids
   stepping/rows.py  EnvRows  == shared memory, mapped by both; the channel carries row numbers, never data ==

Faults: a dead or hanging worker is replaced by ../remote/vec_env.py; each of its environments then delivers one faulty
row (stepping/pending_faults.py). What Ray shares with this is in ../remote/.
"""
