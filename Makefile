# Everything happens in .venv, which the first target creates.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow check format bench clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

test: .venv/test
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/test
	$(BIN)/python -m pytest -m slow

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

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

.venv/demo: .venv/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

.venv/test: .venv/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ .venv/demo
