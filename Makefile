# `make quickstart` and `make test` need only Python 3.10+ and git.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_WORKERS ?= logical
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG ?= 0.5.23

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-sglang test-sglang-api sglang-env test-unit lint format docs bench clean

quickstart: $(STAMP)
	$(BIN)/slime quickstart --seed $(SEED)

# Test files run side by side, one per core; a file's tests stay together and share what its fixtures have started.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Stock SGLang on CPU, in an environment of its own. Its half of the engine API's conformance suite (`make test` has the
# embedded engine's), then engine actors, whole runs, and a short quickstart.
test-sglang: test-sglang-api
	$(SGLANG_BIN)/python -m pytest tests/backends/sglang -m system
	$(SGLANG_BIN)/slime quickstart --sft-steps 20 --rollouts 2 --seed $(SEED) -- --rollout-engine sglang

test-sglang-api: $(SGLANG_STAMP)
	SLIME_TEST_SGLANG=1 $(SGLANG_BIN)/python -m pytest tests/conformance tests/backends/sglang \
		-k "not embedded" -m "not system"

sglang-env: $(SGLANG_STAMP)

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
	rm -rf $(VENV) $(SGLANG_VENV) runs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("slime needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(SGLANG_STAMP): pyproject.toml requirements-sglang-cpu.txt
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --upgrade pip
	$(SGLANG_BIN)/python -m pip install --quiet --requirement requirements-sglang-cpu.txt
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps sglang==$(SGLANG) triton==3.7.1
	$(SGLANG_BIN)/python -m pip install --quiet --constraint requirements-sglang-cpu.txt --editable '.[dev]'
	touch $@
