# `make quickstart` and `make test` need only Python 3.10+ and git.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-unit lint format docs bench clean

quickstart: $(STAMP)
	$(BIN)/slime quickstart --seed $(SEED)

test: $(STAMP)
	$(BIN)/python -m pytest

test-unit: $(STAMP)
	$(BIN)/python -m pytest -m unit

lint: $(STAMP)
	$(BIN)/pre-commit run --all-files

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet . && $(BIN)/isort --quiet . && $(BIN)/black --quiet .

docs: $(STAMP)
	$(BIN)/python -m slime.arguments.reference > docs/flags.md

bench: $(STAMP)
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/grpo_cpu.py

clean:
	rm -rf $(VENV) runs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("slime needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
