"""Which simulator runs which environment, as simulators are slow, come late, leave or are many."""

import time
from functools import partial

import numpy as np
import pytest
from helpers.link_steps import LIFE, steps, steps_on
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.core.errors import UserError
from corral.envs.backends.simulators import slots as link_slots
from corral.testing import CountingEnv, SlowEnv
from corral.testing.play import play


def test_slow_simulator_hands_over_envs_at_episode_end(sims, monkeypatch):
    monkeypatch.setattr(link_slots, "_BALANCE_S", 0.2)
    url = free_url()
    for pause_s in (0.001, 0.01):
        sims.append(Sim(partial(SlowEnv, pause_s, pause_s, length=10), url))
    with corral.make_vec(url, 8, workers=2) as vec:
        batches = steps(vec, 60)
        quick, slow = sorted(vec.fleet.sessions.values(), key=lambda session: session.row_s)
        assert quick.used_slots + slow.used_slots == 8
        assert slow.used_slots <= 2  # it would have one of eleven steps if seats were divisible
    ends = [np.flatnonzero(b.terminated) for b in batches]
    assert sum(map(len, ends)) == 8 * 6  # nobody's episode was cut or joined on the way
    assert not any(b.faulty.any() or b.truncated.any() for b in batches)


def test_a_late_joiner_takes_a_share_when_episodes_end(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 4) as vec:
        batches = steps(vec, 8)
        sims.append(Sim(partial(CountingEnv, 5), url))
        until = time.monotonic() + 30
        while len(vec.fleet.sessions) < 2 and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        batches += steps_on(vec, batches[-1], 20)
        assert sorted(s.used_slots for s in vec.fleet.sessions.values()) == [2, 2]
    assert not any(b.faulty.any() for b in batches)
    for b in batches:  # no episode was cut or joined on the way
        np.testing.assert_array_equal(b.next_obs[:, 2], b.reward)
        np.testing.assert_array_equal(b.terminated, b.reward == 5)
        assert (b.obs[b.terminated][:, 2] == 0).all()


class Shy(CountingEnv):
    """Fails in the first resets that a learner asks for."""

    seeded = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Shy.seeded += 1
            if 1 < Shy.seeded <= 3:  # the very first is a look at what it can do
                raise RuntimeError("not yet")
        return super().reset(seed=seed, options=options)


def test_episode_end_arrives_though_next_start_fails(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 4) as vec:
        batches = steps(vec, 3)
        sims.append(Sim(partial(Shy, 5), url))
        until = time.monotonic() + 30
        while not vec.restarts and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        batches += steps_on(vec, batches[-1], 10)
    assert "not yet" in vec.faults[0].detail
    for b in batches:
        np.testing.assert_array_equal(b.next_obs[:, 2], b.reward)
        np.testing.assert_array_equal(b.terminated, b.reward == 5)
        np.testing.assert_array_equal(b.first, b.terminated)


def test_envs_stay_in_leaving_simulator_until_replaced(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 2) as vec:
        batches = steps(vec, 3)
        (session,) = vec.fleet.sessions.values()
        session.retiring = True
        vec._rebalancer.plan(vec._sessions)
        batches += steps_on(vec, batches[-1], 12)
        assert session.used_slots == 2
        sims.append(Sim(partial(CountingEnv, 5), url))
        until = time.monotonic() + 30
        while session.used_slots and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        assert session.used_slots == 0
    for b in batches:
        assert not b.faulty.any()
        np.testing.assert_array_equal(b.terminated, b.reward == 5)


def test_closed_vec_env_frees_its_slots(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url, slots=4))
    with corral.make_vec(url, 2) as vec:
        batches = steps(vec, 3)
        (session,) = vec.fleet.sessions.values()
        for _ in range(3):
            with corral.make_vec(url, 2) as other:
                batch = other.recv()
                assert session.used_slots == 4
                other.send(batch.env_ids, np.zeros(2, np.int64))  # under way when it is closed
            batches += steps_on(vec, batches[-1], 5)
            assert session.used_slots == 2


def test_32_simulators_at_once(sims):
    url = free_url()
    sims += [Sim(partial(CountingEnv, 5), url, slots=2) for _ in range(32)]
    with corral.make_vec(url, 64, workers=32) as vec:
        for rows in play(vec, 20):
            assert [row.next_obs[LIFE] for row in rows] == list(range(1, 21))


def test_more_envs_than_simulator_slots_are_refused(sims):
    url = free_url()
    sims.append(Sim(CountingEnv, url, bind=True, slots=2))
    wait_for(url)
    with pytest.raises(UserError, match="at most 2 environments"):
        corral.make_vec(url, 4)
