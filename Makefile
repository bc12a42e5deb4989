.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest
COVERAGE := --cov --cov-report=term:skip-covered

# The image. BASE needs Python 3.11 or newer with venv, and git; IMAGE_PYTHON is its Python's version.
BASE ?= python:3.13-bookworm
IMAGE_PYTHON ?= 3.13
IMAGE ?= nightshift

.PHONY: help demo demo-real test test-all test-docker check lint types format schema docs bench bench-context bench-log bench-policy bench-sandbox image build wheels clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed-%: pyproject.toml .ci/venv
	@.ci/venv $(VENV) $*

demo: $(VENV)/.installed-demo ## Run a whole task on a small repository made on the spot, without a key
	@$(BIN)/python configs/demo/run.py quick build/demo

demo-real: $(VENV)/.installed-demo ## The same on a real package from PyPI, with a bug put in
	@$(BIN)/python configs/demo/run.py real build/demo-real

test: $(VENV)/.installed-test ## Fast tests with branch coverage
	@.ci/bubblewrap
	$(PYTEST) -m "not slow and not docker" $(if $(ARGS),$(ARGS),$(COVERAGE))

test-all: $(VENV)/.installed-test ## Every test; both sandbox backends and a Docker engine are demanded
	$(PYTEST) --require-backend bubblewrap,landlock $(ARGS)

test-docker: $(VENV)/.installed-test ## The image on a real Docker engine
	$(PYTEST) -m docker $(ARGS)

check: lint types schema docs ## Everything that needs no test run: lint, types, import rules, drift of schemas and docs

lint: $(VENV)/.installed-dev ## ruff, formatting, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev ## mypy, strict, tests included
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Format the code and sort imports
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

schema: $(VENV)/.installed-dev ## Check that configs/schema is what the code says (WRITE=1 writes it)
	$(BIN)/python -m runner.config.schema $(if $(WRITE),--write,--check)
	$(BIN)/python -m runner.artifacts.schema $(if $(WRITE),--write,--check)

docs: $(VENV)/.installed-dev ## Check that docs/reference is what the code says (WRITE=1 writes it)
	$(BIN)/python -m runner.reference $(if $(WRITE),--write,--check)

bench: $(VENV)/.installed-demo ## Measure this runner beside the least a Python loop can do
	$(BIN)/python bench/run.py $(ARGS)

bench-context: $(VENV)/.installed-demo ## Compare policies of compaction by what a provider's prefix cache saves
	$(BIN)/python bench/bench_context.py $(ARGS)

bench-log: $(VENV)/.installed-demo ## Measure reading a log of 1 GB, and a session of 5,000 steps
	$(BIN)/python bench/bench_log.py $(ARGS)
	$(BIN)/python bench/bench_steps.py

bench-policy: $(VENV)/.installed-demo ## Measure what deciding one call costs
	$(BIN)/python bench/bench_policy.py

bench-sandbox: $(VENV)/.installed-demo ## Measure what the sandbox adds to one command
	$(BIN)/python bench/bench_sandbox.py $(ARGS)

build: $(VENV)/.installed-dev ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation --outdir dist .

wheels: $(VENV)/.installed-demo
	@.ci/wheels $(BIN)/python $(IMAGE_PYTHON) build/wheels

image: wheels ## Build the container image (BASE=..., IMAGE_PYTHON=..., IMAGE=...)
	.ci/image $(BASE) $(IMAGE)

clean: ## Remove what the other targets made, the virtual environment included
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
