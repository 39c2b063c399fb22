# All targets use .venv, which the first one creates.
PYTHON ?= python3
BIN := .venv/bin
COMMA := ,
# The tests start hundreds of processes; without compiled modules each would compile Corral anew.
export PYTHONDONTWRITEBYTECODE =
# Show pip's output only if it fails.
INSTALL = $(BIN)/python -m pip install $(1) > .venv/install.log 2>&1 || { cat .venv/install.log; exit 1; }

.PHONY: demo test test-fast test-slow test-all test-benchmarks measure check format bench bench-training bench-replay bench-exchange bench-link bench-search bench-planning learning learning-sharing learning-simulators learning-planning learning-precision \
	frozen states faults fuzz fuzz-atheris fuzz-cpp soak clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

# Two test modules at a time; those that need Ray share one process, those that need the C++ SDK another.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# Every change must pass this: every behaviour once, in under ten minutes on two cores (eight when nothing else runs).
test: .venv/test
	$(PYTEST)

# For the inner loop, one minute: no Ray, no C++, no multi-process runs, no learning curves.
test-fast: .venv/test
	$(PYTEST) tests/test_imports.py $(addprefix tests/,core ops nets data acting algos/test_algos.py algos/test_ppo_loss.py algos/test_policy_gradient_loss.py algos/test_dqn.py algos/test_apex.py \
	algos/test_appo.py algos/test_impala.py algos/test_schedule.py learn config golden/test_golden_weights.py)

# The behaviours of `make test` on more backends, runtimes, algorithms and formats, or for longer: ten minutes.
test-slow: .venv/test
	$(PYTEST) -m slow

# All tests except benchmarks of speed and learning, fuzzing and soaking: about two hours.
test-all: check test test-slow test-benchmarks faults frozen states

# Small runs of every benchmark, with the peer libraries that are installed.
test-benchmarks: .venv/test
	$(BIN)/python -m pytest benchmarks/tests

# Sizes and names of the tree: files, lines, settings, words.
measure: .venv/test
	$(BIN)/python tools/measure.py

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_imports.py

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/test
	$(BIN)/python -m benchmarks sampling

bench-training: .venv/test
	$(BIN)/python -m benchmarks training

bench-replay: .venv/test
	$(BIN)/python -m benchmarks replay

# Needs root: two network namespaces with a slow link between them.
bench-exchange: .venv/test
	$(BIN)/python -m benchmarks exchange

# Compiles a simulator and steps it over every transport: ten minutes.
bench-link: .venv/test
	$(BIN)/python -m benchmarks link --table BENCHMARKS.md

# Tree search compared with mctx, OpenSpiel and LightZero, if installed: five minutes.
bench-search: .venv/test
	$(BIN)/python -m benchmarks search --table BENCHMARKS.md

# What search adds to a half-trained policy, and planners without learning: half an hour.
bench-planning: .venv/test
	$(BIN)/python -m benchmarks planning --table BENCHMARKS.md

# Tests every learning claim of BENCHMARKS.md over three seeds and writes its table: half an hour.
learning: .venv/test
	$(BIN)/python -m benchmarks learning

# The same for data-parallel learning: half an hour.
learning-sharing: .venv/test
	$(BIN)/python -m benchmarks learning --table sharing

# The same on C++ simulators, which it compiles: ten minutes.
learning-simulators: .venv/test
	$(BIN)/python -m benchmarks learning --table simulators

# The same for learning with search, including board games: an hour and a half.
learning-planning: .venv/test
	$(BIN)/python -m benchmarks learning --table planning

# The same from images, with the encoder in bf16 and in float32: half an hour.
learning-precision: .venv/test
	$(BIN)/python -m benchmarks learning --table precision

# Trains and resumes with this code and with that of an earlier commit, and compares the weights bit for bit.
frozen: .venv/test
	$(BIN)/python tests/golden/frozen.py

# Saves, loads and expands states of every kind of simulator for 10,000 steps, then 100,000 saves and drops: half an hour.
states: .venv/test
	CORRAL_LONG_STATES=1 $(BIN)/python -m pytest tests/contracts/test_states.py --timeout 3600

# Kills actors, learners, inference servers, replay shards and Ray nodes in the middle of runs.
faults: .venv/test
	$(BIN)/python -m pytest -m faults

# A million random and mutated messages to every decoder of the link, on both sides; and coverage-guided fuzzers, if
# installed: Atheris for one minute per decoder, libFuzzer for ten minutes.
fuzz: .venv/test
	CORRAL_FUZZ=1000000 $(BIN)/python -m pytest tests/link/test_fuzz.py tests/link/test_fuzz_hypothesis.py -s --timeout 7200
	@if $(BIN)/python -c "import atheris" 2> /dev/null; then $(MAKE) fuzz-atheris; \
	else echo "Atheris skipped: it is not installed. Try $(BIN)/python -m pip install atheris."; fi
	@if command -v clang++ > /dev/null && command -v cmake > /dev/null; then $(MAKE) fuzz-cpp; \
	else echo "C++ fuzzers skipped: install cmake, and clang with its runtime (libclang-rt-*-dev)."; fi

fuzz-atheris: .venv/test
	set -e; export PYTHONPATH=tests; for name in $$($(BIN)/python -c "from helpers.decoders import DECODERS; print(*DECODERS)"); do \
	$(BIN)/python tests/link/fuzz_atheris.py $$name build/atheris/$$name -max_total_time=60 -timeout=5 -artifact_prefix=build/atheris/; done

# stderr has one line per message that a simulator refused.
fuzz-cpp:
	CXX=clang++ cmake -S sdk/cpp -B build/fuzz -DCORRAL_LIBFUZZER=ON -DCORRAL_SANITIZE=address
	cmake --build build/fuzz --target libfuzzer test_fuzz
	mkdir -p build/fuzz/seeds build/fuzz/corpus
	build/fuzz/test_fuzz --seeds build/fuzz/seeds
	build/fuzz/test_fuzz 1000000 2> build/fuzz/stderr || { tail -50 build/fuzz/stderr; exit 1; }
	build/fuzz/libfuzzer build/fuzz/corpus build/fuzz/seeds sdk/vectors -max_total_time=600 -max_len=8192 -timeout=5 \
	-rss_limit_mb=1024 -close_fd_mask=2 -artifact_prefix=build/fuzz/

# Half an hour of training in each topology; fails if memory grows by more than 1 MB per minute.
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
	@echo "Installing Corral and its test dependencies into .venv; this takes a few minutes."
	@$(call INSTALL,-e '.[test]')
	@touch $@ .venv/demo
