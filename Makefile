# `make` lists the targets. The first target that needs the virtual environment builds it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
OUT ?= out/demo
ARGS ?=
# Of the tests that take turns, being too many for every commit: the part that is due, or its number (tests/sampling.py).
PART ?= commit

# Each test file runs in one process, so that its fixtures are set up once; files start in the order of their names. If
# ARGS names tests, they run in pytest's own process: --pdb and -s work there, and a single test starts faster.
PROCESSES = 2
IN_PARALLEL = $(if $(filter tests/%,$(ARGS)),,-n $(PROCESSES) --dist loadfile --no-loadscope-reorder)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo demo-cluster test test-gpu slow exhaustive lint check ring-check bench docs site serve clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)  OUT=$(OUT)  ARGS=$(ARGS)  PART=$(PART)"
	@echo "For another build of torch, name the index that has it: make TORCH_INDEX=URL demo"

demo: $(VENV)/serve ## Serve a mixed workload with deadlines, and write pictures and a report to OUT
	@$(BIN)/tilework demo --out $(OUT) $(ARGS)
	@echo "Next: make serve, or '. $(BIN)/activate' for a shell that knows the command tilework"

demo-cluster: OUT = out/demo-cluster
demo-cluster: $(VENV)/serve ## Serve a workflow over two nodes of this machine, kill one, and compare with one machine
	@$(BIN)/tilework demo --nodes 2 --workers 1 --requests 12 --workflow examples/poster.py:poster --out $(OUT) $(ARGS)

test: $(VENV)/dev ## Run the tests; ARGS is passed to pytest
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not exhaustive" $(ARGS)

# They wait for processes that they start.
slow exhaustive: PROCESSES = 3

slow: $(VENV)/dev ## Run the tests that take minutes, in which workers and servers are killed, and a part of the exhaustive ones
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m "slow or exhaustive" --part "$(PART)" $(ARGS)

exhaustive: PART = all
exhaustive: $(VENV)/dev ## Run all tests that take turns at commits, in full: before a release, or after a change of what they cover
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m exhaustive --part "$(PART)" $(ARGS)

test-gpu: $(VENV)/dev $(VENV)/quantize ## Run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu -rs $$(grep -rl --include='test_*.py' pytest.mark.gpu tests) $(ARGS)

lint: $(VENV)/dev ## Check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check: lint test ring-check slow ## Run all that a change must pass: lint, test, ring-check, slow

ring-check: $(VENV)/dev ## Check the protocol of the ring: its models with SPIN, its steps in all interleavings
	@PYTHONPATH=tests $(BIN)/python -m comm.ring.check

bench: $(VENV)/dev ## Measure speed and memory; ARGS is passed to bench/run.py
	@$(BIN)/python bench/run.py $(ARGS)

docs: $(VENV)/serve ## Record the examples of the API from a server that is started for it, and write the score of classes
	@$(BIN)/python tools/api_examples.py > examples.tmp
	@mv examples.tmp src/tilework/server/api/examples.json
	@$(BIN)/python tools/class_tables.py docs/models.md README.md

# What pages link to lies beside them as in the repository: results, deployment files, examples, cost tables. The pages of
# the API, of settings and of classes are made here: of the OpenAPI document, the fields and the diffusers installed.
site: OUT = out/site
site: $(VENV)/serve $(VENV)/docs ## Build the documentation as a site in OUT/html; a broken link is an error
	@rm -rf $(OUT)/pages $(OUT)/html
	@mkdir -p $(OUT)/pages
	@cp mkdocs.yml $(OUT)
	@cp --parents -r *.md LICENSE docs deploy examples bench/README.md bench/results bench/suite/decisions/names.json \
		tests/README.md lab/README.md lab/docs training/*/README.md training/*/*.json training/*/*.png src/tilework/data/grafana.json $(OUT)/pages
	@$(BIN)/python tools/api_reference.py > $(OUT)/pages/docs/api.md
	@$(BIN)/python tools/settings_table.py > $(OUT)/pages/docs/settings.md
	@$(BIN)/python tools/class_tables.py --tables > $(OUT)/pages/docs/classes.md
	@$(BIN)/zensical build --strict --config-file $(OUT)/mkdocs.yml
	@echo "$(OUT)/html/index.html; any web server can serve the folder, such as $(BIN)/python -m http.server -d $(OUT)/html"

serve: $(VENV)/serve ## Start a server with the shipped model; ARGS is passed to tilework serve
	@$(BIN)/tilework serve $(ARGS)

clean: ## Remove outputs and caches, but not the virtual environment
	@rm -rf out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench lab training -name __pycache__ -prune -exec rm -rf {} +

# Stamp files, one per level of the virtual environment. torch has its own, so that a changed pyproject.toml does not
# replace the build of torch that was installed.

$(VENV)/torch:
	@echo "==> creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing $(TORCH): by far the largest download, often minutes"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

# The C extension of the ring is compiled when tilework is installed.
$(VENV)/serve: pyproject.toml hatch_build.py src/tilework/comm/ring/_native.c | $(VENV)/torch
	@echo "==> installing tilework with what it needs to serve"
	@$(PIP) --editable ".[serve]"
	@touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/torch
	@$(PIP) --editable ".[docs]"
	@touch $@

$(VENV)/quantize: pyproject.toml | $(VENV)/serve
	@$(PIP) --editable ".[quantize]"
	@touch $@

$(VENV)/dev: pyproject.toml lab/pyproject.toml $(VENV)/serve
	@echo "==> installing the tools for tests and checks"
	@$(PIP) --editable ".[dev]" --editable lab
	@touch $@
