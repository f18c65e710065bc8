# `make help` lists the targets. ARGS reaches the command: make run ARGS="configs/mnist.yaml --json"

.DEFAULT_GOAL := help
.PHONY: help setup run check test test-slow slow-tests slow-cluster-tests test-long lint style chaos compile golden docs bench scaling experiments image clean lock

BIN := .venv/bin
PYTHON := $(BIN)/python
PIP := PYTHONWARNINGS=ignore $(PYTHON) -m pip --quiet --disable-pip-version-check
UV := $(PYTHON) .ci/uv.py
PYTEST := $(PYTHON) -m pytest
SETUP := .venv/.setup
# Whoever sets it would have pytest rewrite 500 files of tests again in every process.
export PYTHONDONTWRITEBYTECODE :=
VARIANT ?= cpu
RUNS ?= 3
ON ?= local
# What is built into the image, `-dirty` behind it where files were changed; empty without git.
COMMIT ?= $(shell git describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null)
IMAGE ?= $(shell sed -n 's/^IMAGE = "\(.*\)"/\1/p' components/image.py)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; \
		do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: $(SETUP) ## create .venv from requirements-dev.lock (every other target does this by itself)

# The locks are complete, so that no requirement of a package is looked up: `--no-deps`. The packages
# that exist as source only are built by the locked setuptools: an isolated build checks no hash.
$(SETUP): pyproject.toml requirements-build.lock requirements-dev.lock .ci/venv .ci/uv.py
	@sh .ci/venv
	@echo "Installing requirements-dev.lock into .venv, a minute or two the first time"
	@$(UV) pip install --no-deps --require-hashes --no-build-isolation \
		--requirement requirements-dev.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

run: $(SETUP) ## the whole pipeline on this machine
	@$(BIN)/flotilla run $(ARGS)

# HOUSE_RULES run where the tests of a change do: in `lint` and in `check`.
HOUSE_RULES := tests/house_rules
SINCE ?= HEAD

check: style ## style, types, house rules, tests of the changed files: make check SINCE=main
	tests=$$($(PYTHON) -m tests.mirror $(SINCE)) && \
		$(PYTEST) -q -m "not slow and not long and not cluster" $(HOUSE_RULES) $$tests $(ARGS)

# Four processes on two cores; six are not faster. The tests that start clusters
# come in a second pass, three at a time. 5: nothing was collected.
test: $(SETUP) ## every test but the slow and the long ones
	$(PYTEST) -m "not slow and not long and not cluster" --ignore $(HOUSE_RULES) \
		--numprocesses 4 --dist loadfile $(ARGS)
	$(PYTEST) -m "cluster and not slow and not long" --numprocesses 3 --dist loadfile $(ARGS) || test $$? -eq 5

# Both halves wait for other processes most of the time, so they run side by side.
test-slow: $(SETUP) ## the slow tests
	$(MAKE) --no-print-directory --jobs 2 slow-tests slow-cluster-tests

slow-tests:
	$(PYTEST) -m "slow and not long and not cluster" --numprocesses 3 --dist loadfile $(ARGS) || test $$? -eq 5

slow-cluster-tests:
	$(PYTEST) -m "slow and not long and cluster" --numprocesses 2 --dist loadfile $(ARGS) || test $$? -eq 5

test-long: $(SETUP) ## what takes longest, before a release
	$(PYTEST) -m long $(ARGS) || test $$? -eq 5

style: $(SETUP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: style ## style, types, import contracts, house rules
	$(PYTEST) -q $(HOUSE_RULES)

chaos: $(SETUP) ## random failures on real runs: make chaos RUNS=20 SEED=1, of tables: ON=tables, on an engine: ON=tfjob, ON=jobset
	$(PYTHON) -m tests.chaos --on $(ON) --runs $(RUNS) $(if $(SEED),--seed $(SEED))

compile: $(SETUP) ## the pipeline as KFP YAML, in build/
	@mkdir -p build
	$(BIN)/flotilla compile -o build/pipeline.yaml $(ARGS)

golden: $(SETUP) ## rewrite the golden files; look at the difference before you keep it
	FLOTILLA_GOLDEN=write $(PYTEST) -q -m "" tests/golden

docs: $(SETUP) ## the pages as a site, in build/site; any broken link is an error: make docs, or make docs ARGS=serve
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build) --strict

bench: $(SETUP) ## Flotilla and the baselines: a table, and build/bench.json; on an idle machine
	$(PYTHON) -m benchmarks $(ARGS)

scaling: $(SETUP) ## 1 to 16 workers here: constants of the simulation, two pages; an idle machine
	$(PYTHON) -m benchmarks.scaling $(ARGS)

experiments: $(SETUP) ## the published experiments, measured, as docs/experiments.md (an hour)
	$(PYTHON) -m benchmarks.experiments

image: ## the container image: make image VARIANT=gpu IMAGE=name:tag BASE=name@sha256:digest
	docker build --build-arg VARIANT=$(VARIANT) --build-arg COMMIT=$(COMMIT) \
		$(if $(BASE),--build-arg BASE=$(BASE)) --tag $(IMAGE) .

clean: ## remove caches and build output; .venv and runs/ stay
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The extras that the image has: KFP's default store, a tracker, signatures.
IMAGE_EXTRAS := --extra s3 --extra mlflow --extra signing
LOCK = $(UV) pip compile --universal --python-version 3.11 --fork-strategy fewest --no-annotate \
	--generate-hashes --custom-compile-command "make lock" $(ARGS)
TENSORFLOW = sed -n 's/^tensorflow==\([^ ]*\).*/$(1)==\1/p' requirements.lock

lock: ## pin what pyproject.toml asks for, and keep other pins; ARGS=--upgrade: the newest of all
	@sh .ci/venv
	@$(LOCK) pyproject.toml $(IMAGE_EXTRAS) --output-file requirements.lock
	@$(LOCK) pyproject.toml --extra dev --constraint requirements.lock \
		--output-file requirements-dev.lock
	@$(LOCK) --group build --no-deps --constraint requirements.lock \
		--output-file requirements-build.lock
	@$(call TENSORFLOW,tensorflow-cpu) | $(LOCK) - --no-deps --output-file requirements-cpu.lock
	@cat requirements.lock requirements-gpu.lock > .venv/gpu.lock
	@$(call TENSORFLOW,tensorflow[and-cuda]) | $(LOCK) - --output-file .venv/gpu.lock
	@sed -n '/^#/p; /^nvidia-/,/[^\]$$/p' .venv/gpu.lock > requirements-gpu.lock
