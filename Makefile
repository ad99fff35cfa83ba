# One set-up for every target: a virtual environment in .venv with pinned packages, made when it is missing or when
# pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 2
NAME := dense_debug
OUT ?= runs/$(NAME)-$(shell date +%Y%m%d-%H%M%S)
export OMP_NUM_THREADS ?= 1

.PHONY: help train train-moe test test-all lint format tensorboard clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: .venv/ready  ## train the debug recipe on the text of Python's standard library (RANKS=2, OUT=folder, ARGS=options)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) recipes/$(NAME).py --out $(OUT) $(ARGS)

train-moe: NAME := moe_debug
train-moe: .venv/ready  ## train the debug recipe with experts, shared by the ranks (RANKS=2, OUT=folder, ARGS=options)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) recipes/$(NAME).py --out $(OUT) --mesh.ep $(RANKS) $(ARGS)

tensorboard: .venv/ready  ## look at all runs in a browser
	$(BIN)/tensorboard --logdir runs

lint: .venv/ready  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/ready lint  ## the tests that every change must pass (minutes)
	$(BIN)/python -m pytest

test-all: .venv/ready lint  ## every layout and the fault loops; goes on where it stopped (.pytest_cache/passed-*), SHARD=i/n takes a part
	$(BIN)/python -m pytest -m '' --resume

format: .venv/ready  ## let ruff write the code as it wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches (runs stay)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
