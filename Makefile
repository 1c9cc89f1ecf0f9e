# Two commands are enough on a bare machine: `make run` and `make test`. Both set up .venv first (see `make setup`).

# The first Python of these that is there; tools/setup_env says so when it is too old.
PYTHON  ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; \
           done | grep . || echo python3)
RECIPE  ?= reasoning/grpo_arithmetic
PACKAGE ?=
NAME    ?=
ARGS    ?=
BIN     := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-run run test lint format wheels evidence clean

help:
	@echo "make run  [RECIPE=$(RECIPE)] [ARGS='key=value ...']   set up and run a recipe"
	@echo "make test [PACKAGE=rlinf-algos] [ARGS='pytest options']   set up and test (one package and its siblings)"
	@echo "make setup      only set up .venv, for run and test"
	@echo "make lint       formatting, ruff, mypy, import contracts, deptry"
	@echo "make format     format and fix what can be fixed"
	@echo "make wheels     build each wheel and test it alone in a clean environment"
	@echo "make evidence NAME=...   repeat an experiment and write docs/evidence/"
	@echo "make clean      remove .venv and caches (run directories stay)"

setup:
	@$(PYTHON) tools/setup_env test

setup-run:
	@$(PYTHON) tools/setup_env run

run: setup-run
	@$(BIN)/rlinf run $(RECIPE) $(ARGS)

ifeq ($(PACKAGE),)
test: setup
	@$(BIN)/python -m pytest -m "not slow and not gpu" --durations=10 --benchmark-disable packages tests $(ARGS)
else
test:
	@$(PYTHON) tools/setup_env package $(PACKAGE)
	@$(BIN)/python tools/test_package $(PACKAGE) $(ARGS)
endif

lint: setup
	@$(BIN)/python tools/lint

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

wheels: setup
	@$(BIN)/python tools/check_wheels $(PACKAGE)

evidence: setup
	@$(BIN)/python tools/evidence $(NAME) $(ARGS)

clean:
	rm -rf .venv .venv-libero build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
