"""The C++ SDK: its own tests, its examples under the conformance checks, and C++ simulators that lose connections."""

import signal
import subprocess
import threading
import time

import gymnasium
import numpy as np
import pytest
from helpers.cpp_sdk import EXAMPLES, NEEDS_ZMQ, SCHEMES, build, run
from helpers.relay import Relay
from helpers.sims import free_url, wait_for

import corral
from corral.testing import check_env
from corral.testing.checks import link as link_checks


@pytest.fixture(autouse=True)
def _measure_speed_briefly(monkeypatch):
    monkeypatch.setattr(link_checks, "_SPEED_S", 0.1)


@pytest.fixture
def start(built):
    """Starts simulators, which end with the test."""
    running = []

    def go(example, *options):
        running.append(subprocess.Popen([built / example, *options], stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield go
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cpp_tests_pass(tmp_path):
    build(tmp_path)
    run("ctest", "--test-dir", tmp_path, "--output-on-failure")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_pass_the_conformance_checks(start, example, scheme):
    url = free_url(scheme)
    start(example, "--connect", url, "--threads", "2")
    results = check_env(url, steps=300)
    failed = [result for result in results if result.status == "fail"]
    assert not failed
    assert len(results) == 12


def test_the_example_is_gymnasiums_cartpole(start):
    url = free_url()
    start("cartpole", "--connect", url)
    gym = gymnasium.make("CartPole-v1").unwrapped
    gym.reset(seed=0)
    rng = np.random.default_rng(0)
    with corral.make_vec(url, 1, seed=5) as vec:
        batch = vec.recv()
        gym.state = batch.obs[0].astype(np.float64)
        for _ in range(200):
            action = int(rng.integers(2))
            vec.send(batch.env_ids, np.array([action]))
            batch = vec.recv()
            obs, _, terminated, _, _ = gym.step(action)
            np.testing.assert_allclose(batch.next_obs[0], obs, rtol=1e-4, atol=1e-5)
            assert batch.terminated[0] == terminated
            if terminated:
                gym.reset(seed=0)
                gym.state = batch.obs[0].astype(np.float64)


def transitions(url, steps, disturb=lambda step: None, **options):
    """Observations, rewards and flags of random play, the same for the same seed."""
    rng, seen = np.random.default_rng(1), []
    with corral.make_vec(url, 4, seed=2, **options) as vec:
        batch = vec.recv()
        for step in range(steps):
            disturb(step)
            vec.send(batch.env_ids, rng.integers(2, size=4))
            batch = vec.recv()
            assert not batch.faulty.any()
            seen.append((batch.next_obs.copy(), batch.reward.copy(), batch.terminated.copy()))
    return seen


def same(a, b):
    for left, right in zip(a, b, strict=True):
        for x, y in zip(left, right, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("after_bytes", [1, 37, 150, 333])
def test_cut_connection_repeats_and_loses_no_step(start, after_bytes, scheme):
    url = free_url(scheme)
    start("cartpole", "--bind", url)
    wait_for(url)
    expected = transitions(url, 120)
    relay = Relay(url)
    try:
        same(transitions(relay.url, 120, lambda step: step % 30 == 20 and relay.cut(after_bytes)), expected)
    finally:
        relay.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_transitions_do_not_depend_on_threads_or_simulators(start, threads):
    first, second = free_url(), free_url()
    start("cartpole", "--connect", first)
    for _ in range(2):
        start("cartpole", "--connect", second, "--threads", str(threads))
    same(transitions(first, 100), transitions(second, 100, workers=2))


@NEEDS_ZMQ
def test_zmq_carries_the_same(start):
    first, second = free_url(), free_url("zmq")
    start("cartpole", "--connect", first)
    process = start("cartpole", "--connect", second)
    same(transitions(first, 100), transitions(second, 100))
    assert process.wait(10) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_listening_simulator_stays_for_next_learner(start, scheme):
    url, started = free_url(scheme), []

    def late():
        wait_for(url)
        started.append(start("cartpole", "--bind", url))

    later = threading.Thread(target=late)
    later.start()
    transitions(url, 5)
    later.join()
    for _ in range(2):
        wait_for(url)
        transitions(url, 5)
    assert started[0].poll() is None


def test_it_ends_when_the_run_is_over_and_on_sigterm(start):
    url = free_url()
    process = start("cartpole", "--connect", url)
    transitions(url, 5)
    assert process.wait(10) == 0
    other = start("cartpole", "--bind", free_url())
    time.sleep(0.5)
    other.send_signal(signal.SIGTERM)
    assert other.wait(10) == 0


@pytest.mark.parametrize(
    "options",
    [(), ("--bind",), ("--bind", "tcp://0.0.0.0:0"), ("--connect", "nonsense"), ("--envs", "0", "--bind", "tcp://127.0.0.1:0"),
     ("--wrong",), ("--connect", "tcp://127.0.0.1:1", "--token-file", "/no/such/file")],
)  # fmt: skip
def test_cpp_command_line_mistake_is_exit_code_2(start, options):
    process = start("cartpole", *options)
    assert process.wait(10) == 2
    said = process.stderr.read().strip()
    assert said
    assert len(said.splitlines()) == 1


def test_a_token_is_proven_in_both_directions(start, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("0123456789abcdef0123456789abcdef")
    bad.write_text("not the same as the other one, at all")
    url = free_url()
    wrong = start("cartpole", "--connect", url, "--token-file", bad, "--patience", "20")
    right = start("cartpole", "--connect", url, "--token-file", good)
    transitions(url, 30, lambda step: time.sleep(0.02), env_kwargs={"token_file": str(good)})
    assert right.wait(10) == 0
    wrong.kill()
    wrong.wait()
    assert "token" in wrong.stderr.read()
