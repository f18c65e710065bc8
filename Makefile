# `make help` lists the targets. A target passes ARGS to its command, for example:
# make run ARGS="configs/mnist.yaml --json"

.DEFAULT_GOAL := help
.PHONY: help setup run check test test-slow slow-tests slow-cluster-tests test-long lint style chaos compile golden docs bench scaling experiments image clean lock

BIN := .venv/bin
PYTHON := $(BIN)/python
PIP := PYTHONWARNINGS=ignore $(PYTHON) -m pip --quiet --disable-pip-version-check
UV := $(PYTHON) .ci/uv.py
PYTEST := $(PYTHON) -m pytest
SETUP := .venv/.setup
# Clear this variable, because without bytecode files every pytest process would rewrite the
# assertions of all test files again.
export PYTHONDONTWRITEBYTECODE :=
VARIANT ?= cpu
RUNS ?= 3
ON ?= local
# The commit that the image records; empty without git. The suffix `-dirty` marks uncommitted changes.
COMMIT ?= $(shell git describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null)
IMAGE ?= $(shell sed -n 's/^IMAGE = "\(.*\)"/\1/p' components/image.py)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; \
		do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: $(SETUP) ## create .venv from requirements-dev.lock (every other target does this by itself)

# `--no-deps` is possible because the locks are complete. Without `--no-build-isolation`, source
# packages would be built by a setuptools whose hash was not checked.
$(SETUP): pyproject.toml requirements-build.lock requirements-dev.lock .ci/venv .ci/uv.py
	@sh .ci/venv
	@echo "Installing requirements-dev.lock into .venv, a minute or two the first time"
	@$(UV) pip install --no-deps --require-hashes --no-build-isolation \
		--requirement requirements-dev.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

run: $(SETUP) ## run the whole pipeline on this machine
	@$(BIN)/flotilla run $(ARGS)

# The house rules run in `lint` and `check`, so `test` leaves them out.
HOUSE_RULES := tests/house_rules
SINCE ?= HEAD

check: style ## check style, types and house rules, and run the tests of changed files: make check SINCE=main
	tests=$$($(PYTHON) -m tests.mirror $(SINCE)) && \
		$(PYTEST) -q -m "not slow and not long and not cluster" $(HOUSE_RULES) $$tests $(ARGS)

# On two cores, six processes are not faster than four. Tests that start clusters run in a second
# pass, three at a time. pytest exits with 5 if it selects no test, for example with ARGS="-k name".
test: $(SETUP) ## all tests except the slow and the long ones
	$(PYTEST) -m "not slow and not long and not cluster" --ignore $(HOUSE_RULES) \
		--numprocesses 4 --dist loadfile $(ARGS)
	$(PYTEST) -m "cluster and not slow and not long" --numprocesses 3 --dist loadfile $(ARGS) || test $$? -eq 5

# Both halves mostly wait for other processes, so they run in parallel.
test-slow: $(SETUP) ## the slow tests
	$(MAKE) --no-print-directory --jobs 2 slow-tests slow-cluster-tests

slow-tests:
	$(PYTEST) -m "slow and not long and not cluster" --numprocesses 3 --dist loadfile $(ARGS) || test $$? -eq 5

slow-cluster-tests:
	$(PYTEST) -m "slow and not long and cluster" --numprocesses 2 --dist loadfile $(ARGS) || test $$? -eq 5

test-long: $(SETUP) ## the longest tests, to run before a release
	$(PYTEST) -m long $(ARGS) || test $$? -eq 5

style: $(SETUP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: style ## check style, types, import contracts and house rules
	$(PYTEST) -q $(HOUSE_RULES)

chaos: $(SETUP) ## cause random failures in real runs: make chaos RUNS=20 SEED=1; with tables: ON=tables; on an engine: ON=tfjob or ON=jobset
	$(PYTHON) -m tests.chaos --on $(ON) --runs $(RUNS) $(if $(SEED),--seed $(SEED))

compile: $(SETUP) ## compile the pipeline to KFP YAML, in build/
	@mkdir -p build
	$(BIN)/flotilla compile -o build/pipeline.yaml $(ARGS)

golden: $(SETUP) ## rewrite the golden files; review the diff before you commit it
	FLOTILLA_GOLDEN=write $(PYTEST) -q -m "" tests/golden

docs: $(SETUP) ## build the pages as a site in build/site; a broken link is an error: make docs, or make docs ARGS=serve
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build) --strict

bench: $(SETUP) ## measure Flotilla and the baselines on an idle machine: a table, and build/bench.json
	$(PYTHON) -m benchmarks $(ARGS)

scaling: $(SETUP) ## measure 1 to 16 workers on an idle machine; write the constants of the simulation and two pages
	$(PYTHON) -m benchmarks.scaling $(ARGS)

experiments: $(SETUP) ## measure the published experiments, and write docs/experiments.md (takes an hour)
	$(PYTHON) -m benchmarks.experiments

image: ## build the container image: make image VARIANT=gpu IMAGE=name:tag BASE=name@sha256:digest
	docker build --build-arg VARIANT=$(VARIANT) --build-arg COMMIT=$(COMMIT) \
		$(if $(BASE),--build-arg BASE=$(BASE)) --tag $(IMAGE) .

clean: ## remove caches and build output; .venv and runs/ stay
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The extras that the image contains; s3 is for KFP's default object store.
IMAGE_EXTRAS := --extra s3 --extra mlflow --extra signing
LOCK = $(UV) pip compile --universal --python-version 3.11 --fork-strategy fewest --no-annotate \
	--generate-hashes --custom-compile-command "make lock" $(ARGS)
TENSORFLOW = sed -n 's/^tensorflow==\([^ ]*\).*/$(1)==\1/p' requirements.lock

lock: ## pin the requirements of pyproject.toml, and keep existing pins; ARGS=--upgrade: pin the newest versions
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
