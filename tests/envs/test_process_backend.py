"""Worker processes: what survives a kill, what is restarted, and what a worker may use."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import gymnasium
import numpy as np
import pytest

import corral
from corral.envs.backends.process.channel import Channel, ChannelClosed
from corral.envs.supervision import Supervision
from corral.testing import CountingEnv, FaultyEnv, SlowEnv
from corral.testing.contracts.vec_env import EPISODE, LIFE, T
from corral.testing.play import play, random_actions


@pytest.mark.parametrize("total", [2_000, pytest.param(20_000, marks=pytest.mark.faults)])
def test_repeated_kills_cost_other_envs_no_transition(total):
    """SIGKILL 1 of 8 environments every 200 steps, now idle, now in the middle of a step."""
    kills = faulty = steps = 0
    life = np.zeros(8)
    with corral.make_vec(partial(CountingEnv, 50), 8, "process", workers=8) as vec:
        act, batch = random_actions(vec), vec.recv()
        while steps < total:
            victim = kills % 8 if steps // 200 > kills else None
            if victim is not None and kills % 2:
                os.kill(vec.worker_pids[victim], signal.SIGKILL)
            vec.send(batch.env_ids, act(batch))
            if victim is not None and not kills % 2:
                os.kill(vec.worker_pids[victim], signal.SIGKILL)
            batch = vec.recv()
            kills += victim is not None
            lost = batch.faulty
            assert set(batch.env_ids[lost]) <= {(kills - 1) % 8}
            seen = batch.next_obs[:, LIFE]
            np.testing.assert_array_equal(seen[~lost], life[~lost] + 1)
            life = np.where(lost, 0, seen)  # a new environment's life begins at 0
            steps += int((~lost).sum())
            faulty += int(lost.sum())
        assert kills == total // 200 - 1
        # A kill in the middle of a step may come after the result: its faulty row is then the next one.
        assert kills - 1 <= faulty <= kills
        assert vec.restarts in (faulty, faulty + 1)


def test_a_keyboard_interrupt_of_an_env_ends_its_episode_alone():
    with corral.make_vec([partial(FaultyEnv, "interrupt"), CountingEnv], 2, "process", workers=1) as vec:
        rows = play(vec, 30)
        assert {fault.kind for fault in vec.faults} == {"raised"}
        assert "KeyboardInterrupt" in vec.faults[0].detail
        assert len(vec.worker_pids) == 1
    assert sum(row.faulty for row in rows[0]) >= 2
    assert not any(row.faulty for row in rows[1])


def test_killed_idle_env_yields_faulty_row_at_next_send():
    with corral.make_vec(partial(CountingEnv, 50), 4, "process", workers=2) as vec:
        act, batch = random_actions(vec), vec.recv()
        vec.send(batch.env_ids, act(batch))
        batch = vec.recv()
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        time.sleep(0.1)
        before = batch.obs.copy()
        vec.send(batch.env_ids, act(batch))
        batch = vec.recv()
        assert batch.faulty.tolist() == [True, False, True, False]  # both environments of worker 0
        np.testing.assert_array_equal(batch.final_obs[[0, 2]], before[[0, 2]])
        assert (batch.obs[[0, 2], T] == 0).all()
        kinds = sorted(fault.kind for fault in vec.faults)
        assert kinds == ["killed", "neighbour"]
        vec.reset(1)
        assert not any(row.faulty for rows in play(vec, 20) for row in rows)


def test_results_before_a_kill_are_delivered_first():
    with corral.make_vec(partial(CountingEnv, 50), 2, "process", workers=1) as vec:
        act, batch = random_actions(vec), vec.recv()
        vec.send(batch.env_ids, act(batch))
        first = vec.recv(env_ids=np.array([0]))  # row 1 arrives with it and stays behind
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        vec.send(first.env_ids, act(first))
        seen = {0: [], 1: []}
        for _ in range(6):
            batch = vec.recv(min_ready=1)
            for k, env_id in enumerate(batch.env_ids.tolist()):
                seen[env_id].append((bool(batch.faulty[k]), batch.next_obs[k, T]))
            vec.send(batch.env_ids, act(batch))
        assert seen[0][0] == (True, 1.0)
        assert seen[1][0] == (False, 1.0)
        assert seen[1][1] == (True, 1.0)


class _Aborted:
    """A socket that Windows has aborted because the process at its other end was killed."""

    def recv_into(self, room):
        raise ConnectionAbortedError(10053, "An established connection was aborted by the software in your host")

    sendall = recv_into


def test_a_connection_aborted_by_the_system_is_closed():
    channel = Channel(_Aborted())
    with pytest.raises(ChannelClosed):
        channel.read()
    with pytest.raises(ChannelClosed):
        channel.send(0)


def test_reset_works_while_a_worker_is_being_replaced():
    with corral.make_vec(partial(CountingEnv, 50), 4, "process", workers=2) as vec:
        act, batch = random_actions(vec), vec.recv()
        vec.send(batch.env_ids, act(batch))
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        vec.reset(5)
        batch = vec.recv()
        assert batch.first.all()
        assert (batch.obs[:, EPISODE] == 0).all()
        assert not batch.faulty.any()


def test_hanging_env_does_not_delay_first_ready():
    factories = [partial(FaultyEnv, "hang", 3, 1)] + [CountingEnv] * 3
    with corral.make_vec(factories, backend="process", workers=4, supervision=Supervision(step_timeout_s=1.5)) as vec:
        act, batch = random_actions(vec), vec.recv()
        rows = np.zeros(4, int)
        while not vec.restarts:
            vec.send(batch.env_ids, act(batch))
            batch = vec.recv(min_ready=1)
            rows[batch.env_ids] += 1
        assert rows[1:].min() > 50
        (fault,) = vec.faults
        assert fault.kind == "hung"
        assert "time.sleep(3600)" in fault.detail or "envs.py" in fault.detail


def test_workers_use_one_thread_each_and_do_not_import_torch():
    class Probe(CountingEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            obs[1] = "torch" in sys.modules
            import torch

            obs[2] = torch.get_num_threads()
            return obs, info

    with corral.make_vec(Probe, 2, "process", workers=2) as vec:
        batch = vec.recv()
        assert (batch.obs[:, 1] == 0).all()
        assert (batch.obs[:, 2] == 1).all()


def test_reset_after_an_idle_worker_died_gives_plain_first_rows():
    with corral.make_vec(CountingEnv, 4, "local", seed=5) as vec:
        expected = vec.recv().obs
    with corral.make_vec(CountingEnv, 4, "process", workers=2) as vec:
        vec.recv()
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        vec.reset(5)
        batch = vec.recv()
        assert batch.first.all()
        assert not (batch.faulty | batch.truncated).any()
        np.testing.assert_array_equal(batch.obs, expected)


@pytest.mark.parametrize("wait_between", [True, False])
def test_idle_env_killed_twice_keeps_last_observation(wait_between):
    with corral.make_vec(partial(CountingEnv, 50), 2, "process", workers=2) as vec:
        act, batch = random_actions(vec), vec.recv()
        for _ in range(3):
            vec.send(batch.env_ids, act(batch))
            batch = vec.recv()
        before = batch.obs.copy()
        for _ in range(2 if wait_between else 1):
            os.kill(vec.worker_pids[0], signal.SIGKILL)
            if wait_between:  # the other environment steps on, so that the death is noticed and replaced
                until = time.monotonic() + 1.0
                while time.monotonic() < until:
                    vec.send(np.array([1]), np.zeros(1, np.int64))
                    vec.recv()
        vec.send(np.array([0]), np.zeros(1, np.int64))
        batch = vec.recv()
        assert batch.faulty.all()
        np.testing.assert_array_equal(batch.final_obs[0], before[0])
        assert batch.obs[0, T] == 0


def test_ready_result_does_not_wait_for_slow_worker():
    factories = [CountingEnv, partial(SlowEnv, 2.0, 2.0)]
    with corral.make_vec(factories, backend="process", workers=2) as vec:
        batch = vec.recv()
        vec.send(np.array([0]), np.zeros(1, np.int64))
        vec.send(np.array([1]), np.zeros(1, np.int64))
        assert vec.recv(env_ids=np.array([0])).env_ids.tolist() == [0]
        assert vec._in_flight.in_flight == 1 << 1  # still in flight
        assert len(batch) == 2


class FlakyStart(CountingEnv):
    """Cannot be built for a while after its process was killed, as with a port that is still busy."""

    def __init__(self, flag):
        if flag.exists() and int(flag.read_text()) > 0:
            flag.write_text(str(int(flag.read_text()) - 1))
            raise OSError("port still busy")
        super().__init__(50)


def test_failed_replacement_is_retried(tmp_path):
    flag = tmp_path / "flag"
    with corral.make_vec(partial(FlakyStart, flag), 1, "process") as vec:
        batch = vec.recv()
        flag.write_text("2")
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        batch = vec.recv()
        assert batch.faulty.all()
        assert [fault.kind for fault in vec.faults] == ["killed", "raised", "raised"]


def test_large_factories_start_quickly_enough_to_start_at_all():
    ballast = np.zeros(60_000_000, np.uint8)
    with corral.make_vec(lambda: (ballast.sum(), CountingEnv())[1], 2, "process") as vec:
        assert len(vec.recv()) == 2


def test_output_of_environments_never_lands_in_shared_memory(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os\n"
        "for fd in (0, 1, 2): os.close(fd)\n"
        "import sys, numpy as np, corral\n"
        "from corral.testing import CountingEnv\n"
        "class Talks(CountingEnv):\n"
        "    def step(self, action):\n"
        "        for fd in (1, 2):\n"
        "            try: os.write(fd, b'x' * 4096)\n"
        "            except OSError: pass\n"
        "        return super().step(action)\n"
        "vec = corral.make_vec(Talks, 2, 'process')\n"
        "batch = vec.recv()\n"
        "for t in range(1, 4):\n"
        "    vec.send(batch.env_ids, np.zeros(2, int))\n"
        "    batch = vec.recv()\n"
        "    assert (batch.obs[:, 2] == t).all()\n"
        "vec.close()\n"
        f"open({str(tmp_path / 'done')!r}, 'w').write('yes')\n"
    )
    subprocess.run([sys.executable, path], timeout=60)
    assert (tmp_path / "done").exists()


def test_unpicklable_factory_is_refused():
    lock = threading.Lock()
    with pytest.raises(corral.UserError, match="cannot be sent to a worker"):
        corral.make_vec(lambda: (lock, CountingEnv())[1], 2, "process")


def test_slow_envs_of_one_worker_arrive_one_by_one():
    with corral.make_vec(partial(SlowEnv, 0.02, 0.02), 4, "process", workers=1) as vec:
        act, batch = random_actions(vec), vec.recv()
        sizes = []
        for _ in range(8):
            vec.send(batch.env_ids, act(batch))
            batch = vec.recv(min_ready=1)
            sizes.append(len(batch))
        assert max(sizes[1:]) < 4


def test_global_generators_of_workers_are_seeded_differently():
    class Rolls(CountingEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            obs[1] = np.random.randint(2**31)
            return obs, info

    with corral.make_vec(Rolls, 1, "process") as vec:
        batch = vec.recv()
        rolls = [batch.obs[0, 1]]
        for _ in range(2):
            os.kill(vec.worker_pids[0], signal.SIGKILL)
            vec.send(batch.env_ids, np.zeros(1, np.int64))
            batch = vec.recv()
            rolls.append(batch.obs[0, 1])
        assert len(set(rolls)) == 3  # a restart does not replay them
    first = []
    for seed in (0, 0, 1):
        with corral.make_vec(Rolls, 2, "process", workers=2, seed=seed) as vec:
            first.append(tuple(vec.recv().obs[:, 1]))
    assert first[0] == first[1] != first[2]
    assert len(set(first[0])) == 2


def test_worker_env_variables_do_not_leak_to_parent():
    before = dict(os.environ)
    with corral.make_vec("CartPole-v1", 2, "process"):
        assert dict(os.environ) == before
    assert gymnasium.spec("CartPole-v1").order_enforce  # the registry is not ours to change
