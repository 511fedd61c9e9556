# `make run` and `make test` work on a new machine; `make help` lists all targets.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
CHAOS_S ?= 600
CHAOS_SEED ?=
FUZZ_EXAMPLES ?= 2000
FUZZ_SEED ?=
RUNS ?= 1
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/tools
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help install install-locked run test test-slow test-loaded test-repeated test-cluster lint lock audit bench \
	chaos fuzz clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "metaban needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.benchmarks: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.development: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.runtime $(VENV)/.benchmarks

# As in the Dockerfile: torch first, since its builds for CPU and CUDA differ; then everything else by hash.
$(VENV)/.locked: pyproject.toml requirements-dev.lock | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	@touch $@ $(VENV)/.runtime $(VENV)/.benchmarks $(VENV)/.development

# Away from what they lock and audit.
$(TOOLS)/.installed: Makefile | $(BIN)/python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check uv==0.13.8 pip-audit==2.10.1
	@touch $@

install: $(VENV)/.development ## create .venv with everything; fast if nothing changed

install-locked: $(VENV)/.locked ## the same with the versions and hashes of requirements-dev.lock, as in CI

run: $(VENV)/.runtime ## start the service (HOST=127.0.0.1 PORT=8000)
	$(BIN)/metaban serve --host $(HOST) --port $(PORT)

lint: $(VENV)/.development ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Empty means "write bytecode": pytest then rewrites assertions once, not in every process of every run.
test test-slow test-loaded test-repeated test-cluster: export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/pytest -n auto --dist worksteal

test: lint ## lint, types and every test but the slow ones
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(VENV)/.development ## the tests that take long: benchmarks, whole deployments, installation
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-loaded: $(VENV)/.development ## all tests in random order on a busy machine (RUNS=3 SEED=1)
	$(BIN)/python -m tests.runs --runs $(RUNS) --seed $(SEED) --busy 4 -- $(PYTEST) $(PYTEST_ARGS)

test-repeated: ## `make test` several times, as a table (RUNS=5)
	$(PYTHON) -m tests.runs --runs $(RUNS) -- $(MAKE) test

test-cluster: $(VENV)/.development ## tests of store, worker and service against a cluster
	METABAN_TEST_TOPOLOGY=cluster $(PYTEST) tests/store tests/worker tests/service $(PYTEST_ARGS)

# The locks hold for every platform and Python of pyproject.toml, and name no index.
UV_COMPILE := $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-annotate --no-config --no-emit-index-url --excludes $(TOOLS)/excluded --upgrade

lock: $(TOOLS)/.installed ## make requirements.lock and requirements-dev.lock anew from pyproject.toml
	@echo torch >$(TOOLS)/excluded
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' \
		>$(TOOLS)/build.txt
	$(UV_COMPILE) --output-file requirements.lock pyproject.toml $(TOOLS)/build.txt
	$(UV_COMPILE) --output-file requirements-dev.lock --all-extras --constraints requirements.lock \
		pyproject.toml $(TOOLS)/build.txt

# --strict: a version that cannot be looked up is a failure, not a pass. torch is in no lock.
audit: $(TOOLS)/.installed ## look up known vulnerabilities of the locked versions (needs network)
	@echo $(TORCH) >$(TOOLS)/torch.txt
	@for options in '-r requirements-dev.lock' '--no-deps -r $(TOOLS)/torch.txt'; do \
		$(TOOLS)/bin/pip-audit --strict --disable-pip $$options 2>$(TOOLS)/audit.log && continue; \
		grep '^Found' $(TOOLS)/audit.log || echo "audit: the advisory service cannot be reached or lacks a version;" \
			"nothing is known. Try again with network; $(TOOLS)/audit.log has the reason."; \
		exit 1; \
	done

bench: $(VENV)/.benchmarks ## quick benchmarks, as tables
	$(BIN)/metaban bench freshness --quick
	$(BIN)/metaban bench regret --quick
	$(BIN)/metaban bench shop --quick
	$(BIN)/metaban bench latency --quick
	$(BIN)/metaban bench fusion --quick
	$(BIN)/metaban bench bayes --quick
	$(BIN)/metaban bench transfer --quick
	$(BIN)/metaban bench hostile --quick

chaos: $(VENV)/.development ## kill processes and cut connections (CHAOS_S=600 CHAOS_SEED=...)
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_S) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(CHAOS_ARGS)

fuzz: $(VENV)/.development ## send valid and invalid requests (FUZZ_EXAMPLES=2000 FUZZ_SEED=...)
	$(BIN)/python -m tests.fuzz --examples $(FUZZ_EXAMPLES) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) $(FUZZ_ARGS)

clean: ## remove .venv and caches; keeps ./data
	rm -rf $(VENV) build client/build src/*.egg-info client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
