"""Every example runs, from another directory, as a user would run it."""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.batches import SPECS, batch_for

from corral.core.types import Sample
from corral.learn.device import Precision
from corral.learn.learner import Learner

ROOT = Path(__file__).parents[1]
ARGUMENTS = {"demo.py": ["--steps", "2000"]}


def examples():
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield pytest.param(path, id=path.name, marks=pytest.mark.slow if "rllib" in path.name else [])


@pytest.mark.parametrize("path", list(examples()))
def test_example_runs(path, tmp_path):
    command = [sys.executable, path, *ARGUMENTS.get(path.name, [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if path.name == "own_training_loop.py":
        returns = [float(x) for x in re.findall(r"mean return +([0-9.]+)", done.stdout)]
        assert max(returns[-10:]) > 2 * returns[0]  # it learns
    if path.name == "demo.py":
        assert "mean return" in done.stdout
        assert (tmp_path / "runs/demo/agent.mp4").stat().st_size > 1000
        assert (tmp_path / "runs/demo/curve.png").stat().st_size > 1000


def python_blocks():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for k, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            if not code.startswith("# not run"):
                several = page.name in ("data_parallel.md", "scaling.md")  # processes, which take seconds to start
                yield pytest.param(code, id=f"{page.name}-{k}", marks=pytest.mark.slow if several else [])


def run_script(folder):
    """Run folder/script.py as a program of its own, with its output in a file."""
    os.chdir(folder)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    runpy.run_path("script.py", run_name="__main__")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_code_in_the_docs_runs(code, tmp_path):
    (tmp_path / "script.py").write_text(code)
    context = multiprocessing.get_context("forkserver")  # has imported torch already, which takes seconds
    context.set_forkserver_preload(["torch", "corral.runs.train"])
    child = context.Process(target=run_script, args=(tmp_path,))
    child.start()
    child.join(120)
    child.kill()
    assert child.exitcode == 0, (tmp_path / "output.txt").read_text()


def test_algorithm_in_the_docs_weights_learners_by_rows(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.DOTALL)
    mine = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)  # where its dataclass is looked up
    exec(code, vars(mine))
    algo = mine.Mine(mine.Config(), SPECS["discrete"], 4)
    learner = Learner(algo, algo.build_model(), torch.Generator(), Precision("fp32", ""))
    batch = batch_for(algo, learner.model, fault=0.1)
    (output,) = learner.step(Sample(batch), 0.0)
    assert 1 < output.rows == batch.valid.sum() < batch.reward.size


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
