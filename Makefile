# Every target does its own set-up. `make demo` and `make test` are the two that must work on a bare machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-long lint bench venv venv-test clean
.DEFAULT_GOAL := help

help:            ## the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: venv       ## one simulated rack, one scripted fault, a live timeline (SCENARIO=gpu-off-bus, ARGS=...)
	@$(BIN)/sentinel demo $(if $(SCENARIO),--scenario $(SCENARIO)) $(ARGS)

test: venv-test  ## lint, types, layers, and every test that fits in CI (installs Debian packages when it may)
	@sh deploy/dev/packages.sh
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: venv-test  ## the tests that need Dynamo's packages and longer than CI has
	@sh deploy/dev/packages.sh
	@$(BIN)/python -m pytest -m long $(ARGS)

lint: venv-test  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: venv      ## every benchmark; each prints JSON, the last line is the result
	@for b in bench/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

venv: $(VENV)/.run
venv-test: $(VENV)/.test

$(VENV)/.run: requirements/run.txt pyproject.toml
	@sh deploy/dev/venv.sh $(PYTHON) $(VENV) requirements/run.txt && touch $@

$(VENV)/.test: requirements/test.txt pyproject.toml
	@sh deploy/dev/venv.sh $(PYTHON) $(VENV) requirements/test.txt && touch $@ $(VENV)/.run

clean:           ## forget the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
