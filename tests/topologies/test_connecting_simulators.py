"""Runs of every topology on environments that connect by `corral serve --connect`, and are killed with them."""

import threading
import time

import numpy as np
import psutil
import pytest
from helpers.run_process import Run
from helpers.served import Served
from helpers.sims import free_url

import corral
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.topologies.base import make_topology


def algos(here):
    """One of the four in `make test`, one in `make test-slow`; the others in `make faults`."""
    marks = {"ppo": pytest.mark.slow, "impala": pytest.mark.slow, here: ()}
    return [
        pytest.param(algo, marks=marks.get(algo, pytest.mark.faults))
        for algo in ("ppo", "impala", "seed_impala", "dppo")
    ]


ACTORS = {"impala": 2, "dppo": 2}
ENOUGH = 8  # slots for the training alone


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


@pytest.fixture
def serve(token):
    started = []

    def start(url, *options, token_file=token):
        secret = () if token_file is None else ("--token-file", token_file)
        started.append(Served("CartPole-v1", url, *options, *secret))
        return started[-1]

    yield start
    for served in started:
        served.end()


def settings(algo, token, steps):
    actors = {"actors": ACTORS[algo]} if algo in ACTORS else {}
    return {
        "steps": steps,
        "env_kwargs": {"token_file": str(token)},
        "eval_episodes": 2,
        "eval_every": 2_000,
        **actors,
    }


@pytest.mark.parametrize("algo", algos("impala"))
def test_run_survives_killed_servers(algo, serve, token, tmp_path):
    url = free_url()
    servers = [serve(url), serve(url)]
    killer = threading.Thread(target=_kill_in_turn, args=(servers, tmp_path / "run"))
    killer.start()
    options = settings(algo, token, 4_000)
    result = corral.train(algo, url, options.pop("steps"), 0, tmp_path / "run", quiet=True, workers=2, **options)
    killer.join(60)
    assert result.steps >= 4_000
    assert np.isfinite(result.eval_return)
    assert servers[1].wait() == 0


def _kill_in_turn(servers, run):
    """A server process, which is replaced, and a whole `corral serve`, whose environments go to the other."""
    while not (run / "metrics.csv").exists():
        time.sleep(0.05)
    servers[1].workers()[0].kill()
    time.sleep(0.5)
    servers[0].kill()


@pytest.mark.parametrize("algo", algos("ppo"))
def test_servers_return_to_a_resumed_learner(algo, serve, token, tmp_path):
    url = free_url()
    served = serve(url)
    words = ["--env", url, "--env-kwargs", f"token_file={token}"]
    words += ["--actors", str(ACTORS[algo])] if algo in ACTORS else []
    run = Run(tmp_path, algo, 4_000, "eval_every=2000", words=words)
    try:
        run.wait_for((run.path / "checkpoints" / "latest").exists)
        run.look()
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()
    assert psutil.wait_procs(run.seen.values(), 10)[1] == []
    result = corral.resume(run.path, quiet=True)
    assert result.steps >= 4_000
    assert np.isfinite(result.eval_return)
    assert served.wait() == 0


def test_server_without_the_token_is_refused_in_one_sentence(serve, token, tmp_path, caplog):
    url = free_url()
    stranger, served = serve(url, token_file=None), []

    def serve_after_refusal():  # else the run may be over before the stranger has come
        stranger.wait()
        served.append(serve(url))

    successor = threading.Thread(target=serve_after_refusal)
    successor.start()
    result = corral.train("ppo", url, 256, 0, tmp_path / "run", quiet=True,
        env_kwargs={"token_file": str(token)}, eval_episodes=0)  # fmt: skip
    successor.join(60)
    assert result.steps >= 256
    assert "did not prove that it knows the token; give it the same --token-file" in caplog.text
    assert stranger.wait() == 2
    assert "refused this simulator" in stranger.text
    assert stranger.text.count("\n") == 1
    assert served[0].wait() == 0


def test_evaluation_fits_into_the_free_slots(serve, token, tmp_path):
    url = free_url()
    served = serve(url, "--envs", ENOUGH + 1)
    options = settings("ppo", token, 256)
    result = corral.train("ppo", url, options.pop("steps"), 0, tmp_path / "run", quiet=True, **options)
    assert np.isfinite(result.eval_return)
    assert served.wait() == 0


def test_backend_of_a_run_at_a_url_is_said_to_be_unused(serve, token, tmp_path, caplog):
    url = free_url()
    serve(url)
    caplog.set_level("INFO", "corral")
    corral.train("ppo", url, 256, 0, tmp_path / "run", quiet=True, backend="process",
        env_kwargs={"token_file": str(token)}, eval_episodes=0)  # fmt: skip
    assert f"backend=process is not used: the simulators at {url} run elsewhere" in caplog.text


def test_evaluation_borrows_slots_if_none_is_free(serve, token, tmp_path):
    url = free_url()
    served = serve(url, "--envs", ENOUGH)
    options = settings("ppo", token, 256)
    result = corral.train("ppo", url, options.pop("steps"), 0, tmp_path / "run", quiet=True, **options)
    assert np.isfinite(result.eval_return)
    assert served.wait() == 0


@pytest.mark.parametrize("runtime", ["process", "ray"])
def test_runtime_of_several_processes_is_refused(runtime):
    experiment = Experiment.make("impala", free_url(), overrides={"runtime": runtime, "actors": 1})
    with pytest.raises(UserError, match=f"only one process, and runtime={runtime} has several: omit runtime"):
        make_topology(experiment, lambda kind, text: None)
