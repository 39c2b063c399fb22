# Everything happens in .venv, which the first target creates.
PYTHON ?= python3
BIN := .venv/bin
COMMA := ,
# Quiet unless it fails: what pip and setuptools say is of no use to anybody otherwise.
INSTALL = $(BIN)/python -m pip install $(1) > .venv/install.log 2>&1 || { cat .venv/install.log; exit 1; }

.PHONY: demo test check format bench bench-training bench-replay bench-exchange bench-link learning learning-sharing learning-simulators faults fuzz soak clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

# Files side by side on two cores; within a file, one test after the other.
test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_imports.py

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/test
	$(BIN)/corral bench sampling

bench-training: .venv/test
	$(BIN)/corral bench training

bench-replay: .venv/test
	$(BIN)/corral bench replay

# Two network namespaces with a slow link between them: needs root.
bench-exchange: .venv/test
	$(BIN)/corral bench exchange

# Compiles a simulator and steps it over every way there is: ten minutes.
bench-link: .venv/test
	$(BIN)/corral bench link --table BENCHMARKS.md

# Trains every claim of BENCHMARKS.md over three seeds, half an hour, and writes its table.
learning: .venv/test
	$(BIN)/corral bench learning

# The same for learners that share: their table, another half an hour.
learning-sharing: .venv/test
	$(BIN)/corral bench learning --table sharing

# The same on simulators in C++, compiled on the spot: ten minutes.
learning-simulators: .venv/test
	$(BIN)/corral bench learning --table simulators

# Kills actors, learners, inference servers, replay shards and Ray nodes in the middle of runs.
faults: .venv/test
	$(BIN)/python -m pytest tests/faults tests/contract tests/unit -m faults

# A million random and mutated messages into every decoder of the link.
fuzz: .venv/test
	CORRAL_FUZZ=1000000 $(BIN)/python -m pytest tests/link/test_fuzz.py --timeout 7200

# Half an hour of training in each topology; fails when memory grows by more than 1 MB per minute.
soak: .venv/test
	$(BIN)/python tests/soak/memory.py --algo ppo
	$(BIN)/python tests/soak/memory.py --algo impala
	$(BIN)/python tests/soak/memory.py --algo apex --set actors=2 replay_shards=2
	$(BIN)/python tests/soak/memory.py --algo seed_impala

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/python:
	$(PYTHON) -m venv .venv
	@$(call INSTALL,--upgrade pip)
	@touch $@

.venv/demo: .venv/python pyproject.toml
	@echo "Installing Corral into .venv; this takes a minute or two."
	@$(call INSTALL,-e '.[plot$(COMMA)video]')
	@touch $@

.venv/test: .venv/python pyproject.toml
	@echo "Installing Corral and what its tests need into .venv; this takes a few minutes."
	@$(call INSTALL,-e '.[test]')
	@touch $@ .venv/demo
