"""Answers that are messages, but say what cannot be: they end their session, and nothing of them is learnt from."""

import copy
import threading

import numpy as np
import pytest
from gymnasium import spaces
from helpers.portable import forced  # noqa: F401
from helpers.raw_simulator import RawSim
from helpers.sims import free_url, wait_for

import corral
from corral.core.errors import EnvFailed
from corral.core.spaces import Layout
from corral.link.protocol import FAULTY, FIRST, TERMINATED, TRUNCATED, Op, Status


def put(op, where, index, value):
    """A change of one number: in the table of rows (reward, flags, status), or in the observations."""

    def change(asked, table, obs):
        if asked == op:
            (obs if where is None else table[where])[index] = value

    return change


REWARD, FLAGS, STATUS = range(3)
BAD = {
    "an observation that is no number": (put(Op.STEP, None, (1, 0), np.nan), "not finite"),
    "an observation without end": (put(Op.STEP, None, (0, 1), -np.inf), "not finite"),
    "a reward that is no number": (put(Op.STEP, REWARD, (1, 0), np.nan), "not finite"),
    "a first observation that is no number": (put(Op.RESET, None, (0, 0), np.nan), "not finite"),
    "a step that failed and is not faulty": (put(Op.STEP, STATUS, 1, Status.E_NO_EPISODE), "E_NO_EPISODE in a row"),
    "a reset that failed and is not faulty": (put(Op.RESET, STATUS, 1, Status.E_ENV), "E_ENV in a row"),
    "a faulty row that says not why": (put(Op.STEP, FLAGS, 0, FAULTY), "without a status"),
}


def play(change, steps=3, **raw):
    url, sims = free_url(), []

    def dial():
        wait_for(url)
        sims.append(RawSim(url, change, **raw))

    thread = threading.Thread(target=dial)
    thread.start()
    try:
        with corral.make_vec(url, 2) as vec:
            vec._timeouts._timeout_s = 0.3  # for another simulator
            batches = [vec.recv()]
            for _ in range(steps):
                vec.send(batches[-1].env_ids, np.zeros(2, np.int64))
                batches.append(vec.recv())
            return batches
    finally:
        thread.join(30)
        for sim in sims:
            sim.end()


@pytest.mark.parametrize("what", BAD)
def test_invalid_reply_ends_the_session(what, caplog):
    change, words = BAD[what]
    with pytest.raises(EnvFailed, match="no simulator"):
        play(change)
    assert words in caplog.text


@pytest.mark.usefixtures("forced")
def test_invalid_reply_ends_the_session_without_epoll(caplog):
    change, words = BAD["a reward that is no number"]
    with pytest.raises(EnvFailed, match="no simulator"):
        play(change)
    assert words in caplog.text


class OnceOutside:
    """Of the second answer to `op`, one row has the observation 7; with `ends`, one that ended has it as its last."""

    def __init__(self, op, *, ends=False):
        self._op, self._ends, self._answers = op, ends, 0

    def __call__(self, asked, table, obs):
        obs[:] = 1
        self._answers += asked == self._op
        if asked == self._op and self._answers == 2:
            if self._ends:
                table[FLAGS][:] = FIRST | TERMINATED
                return np.array([3, 7])
            obs[-1] = 7
        elif asked == Op.STEP and self._op == Op.RESET and self._answers == 1:
            table[FLAGS][1], table[STATUS][1] = FAULTY | TRUNCATED, Status.E_ENV  # so that it is reset
        return None


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("how", [OnceOutside(Op.STEP), OnceOutside(Op.RESET), OnceOutside(Op.STEP, ends=True)])
def test_discrete_value_outside_its_space_costs_its_row_only(how, start, caplog):
    observation = Layout(spaces.Discrete(5 - start, start=start))
    batches = play(copy.copy(how), 4, observation=observation)
    for batch in batches:
        for obs in (batch.obs, batch.next_obs):
            assert ((obs >= start) & (obs < 5)).all()
    assert [b.faulty.tolist() for b in batches].count([False, True]) == 1
    assert not any(b.faulty[0] for b in batches)
    assert f"leaf 'value' is 7, outside its space {observation.space}" in caplog.text
    if how._ends:
        assert (batches[2].terminated.tolist(), batches[2].next_obs[0]) == ([True, False], 3)


def test_large_numbers_are_numbers():
    batches = play(put(Op.STEP, None, (0, 0), 3e38))
    assert [b.obs[0, 0] for b in batches[1:]] == [np.float32(3e38)] * 3
