# Targets: see `make help`.
#
# TORCH=torch==2.14.1 picks another PyTorch. Each version has a virtual environment of its own, so
# that a switch back costs nothing; `.venv/` is the default's.

DEFAULT_TORCH := torch==2.13.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
# Test processes side by side; each runs its tensors on one thread.
JOBS ?= 2

# What TORCH says as part of a file name: torch==2.14.1+cpu is 2.14.1-cpu.
VERSION := $(shell printf '%s' '$(TORCH)' | sed -e 's/^torch==//' | tr -c 'A-Za-z0-9.' '-')
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(VERSION))
# Named after the version: another default in this file renews `.venv/` too.
STAMP := $(VENV)/made-for-$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help venv demo test fuzz mutants lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10
	@echo 'Variables: TORCH=$(TORCH) (into $(VENV)/), PYTHON=$(PYTHON), ARGS= for demo and test, JOBS=$(JOBS)'

venv: $(STAMP)  ## make the virtual environment that the other targets share

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) \
		and f"fxpasses needs Python 3.11 or newer: make PYTHON=..., not {sys.executable}")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install '$(TORCH)'
# Named again, so that pip can't exchange it for what a dependency would rather have.
	$(VENV)/bin/python -m pip install '$(TORCH)' -e '.[dev,demo]'
	@rm -f $(VENV)/made-for-*
	@touch $@

demo: $(STAMP)  ## train a small GPT on two ranks, beside DDP; ARGS=--steps=100
	$(VENV)/bin/python -m bench.demo $(ARGS)

test: $(STAMP)  ## run the tests; ARGS='-k order', ARGS='-k golden --bless'
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/ -n $(JOBS) --dist loadfile $(ARGS)

fuzz: $(STAMP)  ## 10,000 drawn graphs for each pass; FXPASSES_EXAMPLES=1000 for fewer
	FXPASSES_EXAMPLES=$${FXPASSES_EXAMPLES:-10000} OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest \
		tests/testing/test_passes.py -n $(JOBS) $(ARGS)

mutants: $(STAMP)  ## break our passes in hundreds of ways; the drawn graphs have to notice
	$(VENV)/bin/python -m bench.mutants $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench:  ## list the benchmarks and how to run them
	@for script in $$(grep -l '__name__ == "__main__"' bench/*.py); do \
		name=$$(basename $$script .py); \
		printf '%s -m bench.%s\n    ' $(VENV)/bin/python "$$name"; \
		sed -n -e '1s/^"""//' -e '1s/"""$$//' -e 1p "$$script"; \
	done

clean:  ## remove outputs and caches; the virtual environments stay
	rm -rf build dist demo-output convergence-output *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find fxpasses custom_ops tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
