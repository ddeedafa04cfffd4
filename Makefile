# Every target does its own set-up. `make demo` and `make test` are the two that must work on a bare machine.
# Another Python: make test PYTHON=python3.12 (it gets an environment of its own, .venv-python3.12).
PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

.PHONY: help demo test test-long lint bench packages venv venv-test dashboards clean
.DEFAULT_GOAL := help

help:            ## the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: venv       ## one simulated rack, one scripted fault, a live timeline (SCENARIO=gpu-off-bus, ARGS=...)
	@$(BIN)/sentinel demo $(if $(SCENARIO),--scenario $(SCENARIO)) $(ARGS)

test: packages lint  ## lint, types, layers, and every test that fits in CI (installs Debian packages when it may)
	@sh deploy/dev/tests.sh $(BIN)/python $(ARGS)

test-long: packages venv-test  ## the tests that need Dynamo's and vLLM's packages (6 GB) and longer than CI has
	@$(BIN)/python -m pytest -m long $(ARGS)

lint: venv-test  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: venv      ## every benchmark; each prints JSON, the last line is the result
	@for b in bench/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

dashboards: venv-test  ## write dashboards/*.json anew from dashboards/generate.py
	@$(BIN)/python dashboards/generate.py

packages:        ## the Debian packages that tests use: installed when it may, named when it may not
	@sh deploy/dev/packages.sh

venv:            ## .venv with what sentinel needs; leaves the command at .venv/bin/sentinel
	@sh deploy/dev/venv.sh $(PYTHON) $(VENV) requirements/run.txt

venv-test:
	@sh deploy/dev/venv.sh $(PYTHON) $(VENV) requirements/test.txt

clean:           ## forget the virtual environment and caches
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
