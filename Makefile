# `make run` and `make test` are all a new machine needs; `make help` lists the rest.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
CHAOS_S ?= 600
CHAOS_SEED ?=
FUZZ_EXAMPLES ?= 2000
FUZZ_SEED ?=
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install run test test-cluster lint bench chaos fuzz clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "metaban needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.development: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.runtime

install: $(VENV)/.development ## create .venv with everything, quick when nothing changed

run: $(VENV)/.runtime ## start the service (HOST=127.0.0.1 PORT=8000)
	$(BIN)/metaban serve --host $(HOST) --port $(PORT)

lint: $(VENV)/.development ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Empty is "no": tests are rewritten for their assertions once, not by every process of every run.
test test-cluster: export PYTHONDONTWRITEBYTECODE :=

test: lint ## lint, types and every test
	$(BIN)/pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-cluster: $(VENV)/.development ## the tests of store, worker and service against a cluster
	METABAN_TEST_TOPOLOGY=cluster $(BIN)/pytest -n auto --dist worksteal tests/store tests/worker tests/service $(PYTEST_ARGS)

bench: $(VENV)/.runtime ## the quick benchmarks, as tables
	$(BIN)/metaban bench freshness --quick
	$(BIN)/metaban bench regret --quick
	$(BIN)/metaban bench latency --quick
	$(BIN)/metaban bench fusion --quick
	$(BIN)/metaban bench bayes --quick
	$(BIN)/metaban bench transfer --quick
	$(BIN)/metaban bench hostile --quick

chaos: $(VENV)/.development ## kill and cut everything for a while (CHAOS_S=600 CHAOS_SEED=...)
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_S) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(CHAOS_ARGS)

fuzz: $(VENV)/.development ## ask what the API's document allows, and what not (FUZZ_EXAMPLES=2000 FUZZ_SEED=...)
	$(BIN)/python -m tests.fuzz --examples $(FUZZ_EXAMPLES) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) $(FUZZ_ARGS)

clean: ## remove .venv and caches; keeps ./data
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
