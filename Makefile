# The ways in for people and CI. Everything is installed into .venv with the pins of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= config.example.toml

.PHONY: run test e2e venv lint bench clean

run: $(BIN)/digestd
	$(BIN)/digestd run --config $(CONFIG)

venv: $(BIN)/digestd

test: $(VENV)/.test
	$(BIN)/python -m pytest

# Against real peers: tests/e2e/install.sh installs them by package name as root, or says which are missing.
e2e: $(VENV)/.test
	@tests/e2e/install.sh
	$(BIN)/python -m pytest tests/e2e

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python tests/bench/bench.py

# Debian without python3-venv has no ensurepip: then an outer pip fills the environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --without-pip $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip

$(BIN)/digestd: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(BIN)/digestd
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.lint: $(BIN)/digestd
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) .e2e .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
