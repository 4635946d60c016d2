# make demo   sets up and makes a picture through a real server
# make test   sets up and runs every test
# make lint   style, types and import layers
# make setup  only the environment in .venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_WORKERS ?= 2
TEST_ARGS ?=

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test lint clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup: $(STAMP)

# The newest of the tested versions; else any newer python3.
$(BIN)/python:
	@python=$${PYTHON:-}; \
	for candidate in python3 python3.12 python3.11; do \
	  [ -z "$$python" ] && command -v $$candidate >/dev/null \
	    && $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	    2>/dev/null && python=$$candidate; done; \
	python=$${python:-python3}; \
	command -v $$python >/dev/null \
	  || { echo "make setup: no $$python found; install Python 3.11 or 3.12" >&2; exit 2; }; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make setup: $$($$python --version 2>&1) is too old; Python 3.11 or newer is" \
	    "needed: install it, or name one with PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	$$python -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "make setup: $$python cannot make virtual environments;" \
	    "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time downloads PyTorch and takes some minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/omnistage demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	  .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
