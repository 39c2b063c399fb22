"""What only the gRPC backend does; the contract it shares with the others is in tests/contract."""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc_workers
import numpy as np
import psutil
import pytest
from grpc_workers import patient_workers  # noqa: F401

import corral
from corral import Supervision
from corral.core.errors import EnvFailed, RunFailed, UserError
from corral.envs import grpc_wire as wire
from corral.envs.backends.remote import messages as ch
from corral.envs.grpc_door import JOINED, LOST, Door
from corral.envs.grpc_session import Session
from corral.envs.grpc_text import as_text
from corral.envs.grpc_worker import work
from corral.envs.stepping.rows import pack
from corral.envs.suites import atari, pixels
from corral.testing.contracts.vec_env import LIFE, T
from corral.testing.envs import BigEnv, CountingEnv
from corral.testing.play import play

grpc = pytest.importorskip("grpc")


def step(vec, ids=None):
    ids = np.arange(vec.num_envs) if ids is None else np.array(ids)
    vec.send(ids, np.zeros(len(ids), np.int64))
    return vec.recv()


def process_of(peer):
    return int(peer.partition("process ")[2].rstrip(")"))


class HangsAtThird(CountingEnv):
    def step(self, action):
        result = super().step(action)
        if result[0][LIFE] == 3:
            time.sleep(1000)
        return result


class SizedByMachine(BigEnv):
    """Its observations are as long as an environment variable of its machine says."""

    def __init__(self):
        super().__init__(int(os.environ["CORRAL_TEST_SIZE"]))


@pytest.fixture
def start():
    """Start a worker process, or several by `corral join`; they are ended in the end."""
    started = []

    def start(address, *, crew=0, patience=20, **env):
        if crew:
            process = grpc_workers.start_join(address, crew, patience)
        else:
            code = f"from corral.envs.grpc_worker import main; main({address!r}, {patience})"
            process = grpc_workers.start("-c", code, **env)
        started.append(process)
        return process

    yield start
    for process in started:
        grpc_workers.end(process)


@pytest.fixture
def door():
    door = Door("127.0.0.1:0", places=1, num_envs=1)
    yield door
    door.close()


def dial(address):
    """How a worker calls."""
    return grpc.insecure_channel(address).stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")


# -- what travels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_transitions_are_those_of_the_local_backend(workers, patient_workers):  # noqa: F811
    with corral.make_vec("CartPole-v1", 5, "local", seed=3) as vec:
        expected = play(vec, 60)
    with corral.make_vec("CartPole-v1", 5, "grpc", workers=workers, seed=3, listen=patient_workers) as vec:
        actual = play(vec, 60)
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.next_obs, y.next_obs)
            np.testing.assert_array_equal(x.following, y.following)
            assert (x.reward, x.terminated, x.truncated) == (y.reward, y.terminated, y.truncated)


def test_a_state_saved_over_grpc_goes_on_locally(patient_workers):  # noqa: F811
    with corral.make_vec("CartPole-v1", 3, "grpc", workers=2, seed=1, listen=patient_workers) as vec:
        vec.record_episodes()
        vec.recv()
        for _ in range(15):
            step(vec)
        state = vec.state_dict()
        expected = [step(vec).obs for _ in range(5)]
    with corral.make_vec("CartPole-v1", 3, "local", seed=9) as vec:
        assert vec.load_state_dict(state) == []
        for obs in expected:
            np.testing.assert_array_equal(step(vec).obs, obs)


@pytest.mark.parametrize(
    "env", [atari("Pong", sticky=0.25), pixels("CartPole-v1", size=40), CountingEnv, partial(CountingEnv, length=3)]
)
def test_what_can_be_imported_by_name_is_built_elsewhere_by_name(env):
    resolved = as_text(env).resolve()
    if isinstance(env, partial):
        assert resolved.factory()._length == 3
    elif env is CountingEnv:
        assert isinstance(resolved.factory(), CountingEnv)
    else:
        assert resolved.factory == env


@pytest.mark.parametrize("env", [lambda: CountingEnv(), partial(CountingEnv, 3)])
def test_an_environment_without_a_name_is_refused_in_one_sentence(env):
    with pytest.raises(UserError, match=r"no name that another machine could import it by; .*'module:Class'"):
        corral.make_vec(env, 2, "grpc", listen="127.0.0.1:0")


def test_what_cannot_be_asked_for_is_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"CountingEnv have no JSON form \(.*ndarray.*use numbers"):
        corral.make_vec(CountingEnv, 2, "grpc", listen="127.0.0.1:0", env_kwargs={"length": np.zeros(3)})
    for wrong in ({"backend": "grpc"}, {"backend": "local", "listen": "127.0.0.1:0"}):
        with pytest.raises(UserError, match=r"listen=HOST:PORT.*go together"):
            corral.make_vec(CountingEnv, 2, **wrong)
    for listen in ("5555", "localhost:x", ":5555", "a:99999"):
        with pytest.raises(UserError, match="must be HOST:PORT"):
            corral.make_vec(CountingEnv, 2, "grpc", listen=listen)
    with pytest.raises(UserError, match="is not an environment"):
        corral.make_vec(7, 2, "grpc", listen="127.0.0.1:0")


def test_two_learners_cannot_listen_on_one_port(door):
    with pytest.raises(UserError, match=f"Cannot listen on {door.address}.*choose another port"):
        corral.make_vec(CountingEnv, 2, "grpc", listen=door.address)


# -- who may join ------------------------------------------------------------------------------------------------


def test_a_worker_with_another_version_of_corral_is_told_the_difference(door, monkeypatch, caplog):
    door.open(0, {})
    monkeypatch.setattr("corral.envs.grpc_session.__version__", "9.9")
    with pytest.raises(UserError, match=rf"Corral 9\.9 is installed here, and the learner has {corral.__version__}"):
        work(wire.connect(door.address), door.address, 5.0)
    assert "was refused: it has Corral 9.9" in caplog.text
    assert door.inbox.empty()


def test_without_a_free_place_a_worker_waits_and_a_stranger_is_put_off(door):
    call = dial(door.address)(iter(()))
    with pytest.raises(grpc.RpcError) as refused:
        next(call)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # it does not say its version
    call = dial(door.address)(iter(()), metadata=((wire.VERSION, corral.__version__),))
    with pytest.raises(grpc.RpcError) as refused:
        next(call)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("junk", [b"junk", b"", wire.to_bytes(ch.READY, {"odd": 1}), b"\xff" * 100])
def test_bytes_that_are_no_message_cost_the_worker_its_place(door, junk):
    door.open(0, {})
    call = dial(door.address)(iter([junk]), metadata=((wire.VERSION, corral.__version__),))
    assert wire.from_bytes(next(call)) == (wire.BUILD, {})
    assert door.inbox.get(timeout=10)[1] == JOINED
    _, op, words = door.inbox.get(timeout=10)
    assert op == LOST
    assert "no message" in words


@pytest.mark.parametrize(
    ("op", "data"), [(ch.SPEC, None), (ch.SPEC, {}), (ch.FAILED, 5), (ch.FAILED, {}), (ch.FAULT, {}), (wire.SEEN, 3)]
)
def test_a_message_that_makes_no_sense_costs_a_worker_its_place_and_nothing_else(op, data, start, caplog):
    address = grpc_workers.free_address()

    def attack():
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(20)
            call = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")(
                iter([wire.to_bytes(op, data)]), metadata=((wire.VERSION, corral.__version__),)
            )
            with contextlib.suppress(grpc.RpcError):
                list(call)
        start(address)  # an honest one

    thread = threading.Thread(target=attack)
    thread.start()
    with corral.make_vec(CountingEnv, 1, "grpc", listen=address) as vec:
        assert len(vec.recv()) == 1
        assert not vec.faults
    thread.join(20)
    assert "makes no sense here" in caplog.text


def test_a_worker_whose_spaces_differ_is_refused_and_the_place_waits_for_another(start, caplog):
    address = grpc_workers.free_address()
    start(address, CORRAL_TEST_SIZE="16")
    made = []
    env = f"{__name__}:SizedByMachine"
    thread = threading.Thread(target=lambda: made.append(corral.make_vec(env, 2, "grpc", workers=2, listen=address)))
    with caplog.at_level(logging.INFO, "corral"):
        thread.start()
        until = time.monotonic() + 60
        while "has environments 0" not in caplog.text and time.monotonic() < until:
            time.sleep(0.05)
        odd = start(address, CORRAL_TEST_SIZE="17")
        assert odd.wait(20) == 2
        said = odd.stderr.read()
    assert "observation space Box(0, 255, (17,), uint8) instead of Box(0, 255, (16,), uint8)" in said
    assert said.count("\n") == 1
    start(address, CORRAL_TEST_SIZE="16")
    thread.join(20)
    with made[0] as vec:
        assert len(vec.recv()) == 2


def test_what_a_worker_cannot_build_is_told_on_both_sides(start):
    address = grpc_workers.free_address()
    crew = start(address, crew=1)
    with pytest.raises(
        UserError, match=r"The worker on .* \(process \d+\): No environment 'CartPol-v1'. Close: CartPole"
    ):
        corral.make_vec("CartPol-v1", 1, "grpc", listen=address)
    assert crew.wait(20) == 2
    assert "No environment 'CartPol-v1'" in crew.stderr.read()


def test_a_worker_that_has_nothing_to_do_keeps_its_place(monkeypatch):
    hasty = [(key, value // 10 if "time" in key or "interval" in key else value) for key, value in wire.OPTIONS]
    monkeypatch.setattr(wire, "OPTIONS", hasty)  # a ping every second, and twice as many are allowed
    door = Door("127.0.0.1:0", places=1, num_envs=1)
    door.open(0, {})
    said = threading.Event()
    channel = grpc.insecure_channel(door.address, options=hasty)
    method = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
    call = method(iter(said.wait, True), metadata=((wire.VERSION, corral.__version__),))
    next(call)
    assert door.inbox.get(timeout=10)[1] == JOINED
    with pytest.raises(queue.Empty):
        door.inbox.get(timeout=4.5)  # a fourth ping that is too much ends the call
    said.set()
    door.close()


# -- who is lost -------------------------------------------------------------------------------------------------


def test_when_nobody_dials_in_it_says_how_to_start_a_worker():
    supervision = Supervision(start_timeout_s=0.5)
    with pytest.raises(
        EnvFailed, match=r"Environments 0, 1 of .* no worker for \d s: start one by `corral join HOST:\d+"
    ):
        corral.make_vec(CountingEnv, 2, "grpc", listen="127.0.0.1:0", supervision=supervision)


def test_environments_of_a_lost_worker_wait_for_a_late_one_while_the_others_go_on(start):
    address = grpc_workers.free_address()
    for _ in range(2):
        start(address)
    with corral.make_vec(CountingEnv, 4, "grpc", workers=2, listen=address, env_kwargs={"length": 0}) as vec:
        vec.recv()
        before = step(vec)
        os.kill(process_of(vec.peers[0]), signal.SIGKILL)
        vec.send(np.arange(4), np.zeros(4, np.int64))
        for k in range(5):
            batch = vec.recv(env_ids=np.array([1, 3]))
            assert batch.obs[:, T].tolist() == [2 + k] * 2
            vec.send(batch.env_ids, np.zeros(2, np.int64))
        while vec.peers[0] is not None:
            vec.linger(5, 0.1)
        start(address)
        batch = vec.recv(env_ids=np.array([0, 2]))
        assert batch.faulty.all()
        assert batch.truncated.all()
        np.testing.assert_array_equal(batch.next_obs, before.obs[[0, 2]])  # the last good ones
        assert batch.obs[:, T].tolist() == [0, 0]
        assert [(f.env_id, f.kind) for f in vec.faults] == [(0, "killed"), (2, "neighbour")]
        assert "the connection was lost" in vec.faults[0].detail
        vec.recv()
        assert not step(vec).faulty.any()


def test_a_worker_beyond_the_places_takes_over_from_one_that_freezes(start, monkeypatch):
    monkeypatch.setattr("corral.envs.grpc_vec._LOOK_S", 0.5)
    address = grpc_workers.free_address()
    first = start(address)
    supervision = Supervision(step_timeout_s=0.5)
    with corral.make_vec(CountingEnv, 1, "grpc", listen=address, supervision=supervision) as vec:
        vec.recv()
        assert process_of(vec.peers[0]) == first.pid
        second = start(address)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            assert step(vec).faulty.all()
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert process_of(vec.peers[0]) == second.pid
        assert [fault.kind for fault in vec.faults] == ["hung"]
        assert not step(vec).faulty.any()
        assert first.wait(20) == 3  # it was given up, and knows


def test_a_place_that_stays_vacant_ends_the_run_in_words(start):
    address = grpc_workers.free_address()
    worker = start(address)
    supervision = Supervision(start_timeout_s=3.0)
    with corral.make_vec(CountingEnv, 1, "grpc", listen=address, supervision=supervision) as vec:
        vec.recv()
        worker.kill()
        with pytest.raises(EnvFailed, match=r"Environments 0 of .* have had no worker for 3 s"):
            step(vec)


def test_of_several_environments_of_a_worker_the_one_that_hangs_is_named(start):
    address = grpc_workers.free_address()
    start(address, crew=1)
    envs = [CountingEnv, HangsAtThird, CountingEnv]
    supervision = Supervision(step_timeout_s=0.5)
    with corral.make_vec(envs, backend="grpc", listen=address, supervision=supervision) as vec:
        vec.recv()
        faulty = [step(vec).faulty.tolist() for _ in range(3)]
        assert faulty == [[False] * 3, [False] * 3, [True] * 3]
        fault = next(fault for fault in vec.faults if fault.kind == "hung")
        assert fault.env_id == 1
        assert "test_grpc_vec.py" in fault.detail  # the stack


class Liar(Session):
    """Sends rows of environments that are not its own."""

    def announce(self, done):
        parcel = pack(self._rows, done)
        parcel.env_ids = np.array([1 - self.ids[0]], "<i8").tobytes()
        self._outbox.put(wire.to_bytes(ch.READY, parcel))


def test_rows_of_environments_that_are_not_its_own_cost_a_worker_its_place(start):
    address = grpc_workers.free_address()
    start(address)

    def lie():
        channel = wire.connect(address)
        while True:
            liar = Liar(channel, 10.0)
            liar.serve()
            if liar.joined:
                return liar.status
            time.sleep(0.05)

    with ThreadPoolExecutor() as pool:
        lying = pool.submit(lie)
        with corral.make_vec(CountingEnv, 2, "grpc", workers=2, listen=address) as vec:
            start(address)
            assert vec.recv().first.all()
            assert [fault.kind for fault in vec.faults] == ["killed"]
            assert "rows that do not fit (rows of others' environments)" in vec.faults[0].detail
            assert not step(vec).faulty.any()
        assert lying.result() == "ABORTED"


# -- corral join -------------------------------------------------------------------------------------------------


def test_join_serves_until_the_run_is_over_and_leaves_nothing_behind(start):
    address = grpc_workers.free_address()
    crew = start(address, crew=2)
    with corral.make_vec("CartPole-v1", 2, "grpc", workers=2, listen=address) as vec:
        assert len(vec.recv()) == 2
        family = psutil.Process(crew.pid).children(recursive=True)
        assert {process_of(peer) for peer in vec.peers} <= {process.pid for process in family}
    assert crew.wait(20) == 0
    assert psutil.wait_procs(family, 10)[1] == []


def test_join_comes_back_to_a_learner_that_was_killed_and_started_again(start):
    address = grpc_workers.free_address()
    crew = start(address, crew=1)
    code = f"import corral; vec = corral.make_vec('CartPole-v1', 1, 'grpc', listen={address!r}); vec.recv()\n"
    with subprocess.Popen([sys.executable, "-c", code + "print('up', flush=True); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as learner:  # fmt: skip
        assert learner.stdout.readline() == b"up\n"
        learner.kill()
    with corral.make_vec(CountingEnv, 1, "grpc", listen=address) as vec:
        assert len(vec.recv()) == 1
    assert crew.wait(20) == 0


def test_a_run_trains_on_workers_that_dial_in_and_evaluates_beside_the_learner(start, tmp_path):
    address = grpc_workers.free_address()
    crew = start(address, crew=1)
    result = corral.train(
        "a2c", "CartPole-v1", 600, 0, tmp_path / "run", quiet=True, num_envs=4, backend="grpc", listen=address,
        **{"evaluation.episodes": 2},
    )  # fmt: skip
    assert result.steps >= 600
    assert np.isfinite(result.eval_return)
    assert crew.wait(20) == 0


def test_join_gives_up_when_no_learner_answers():
    address = grpc_workers.free_address()
    with pytest.raises(RunFailed, match=f"No learner answers at {address}.*is it running"):
        work(wire.connect(address), address, 0.5)
    crew = grpc_workers.start_join(address, 2, 0.2)
    assert crew.wait(20) == 1
    grpc_workers.end(crew)


def test_a_learner_that_takes_calls_and_says_nothing_is_left(monkeypatch):
    monkeypatch.setattr("corral.envs.grpc_session._ANSWER_S", 0.3)
    over = threading.Event()

    def say_nothing(requests, context):
        over.wait(20)
        yield b""

    handler = {wire.METHOD: grpc.stream_stream_rpc_method_handler(say_nothing)}
    server = grpc.server(ThreadPoolExecutor())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handler),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(RunFailed, match=r"takes calls, and says nothing for 0.3 s"):
            work(wire.connect(f"127.0.0.1:{port}"), "there", 0.0)
    finally:
        over.set()
        server.stop(0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "must be HOST:PORT"),
        (["a:1", "--workers", "0"], "--workers must be at least 1"),
        (["a:1", "--patience", "x"], "--patience must be a number"),
    ],
)
def test_join_refuses_what_it_cannot_do_in_one_sentence(args, words, capsys):
    from corral.cli.main import main

    assert main(["join", *args]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
