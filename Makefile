# Needs Python >= 3.11, git and make; everything else goes into .venv on the first run.
#
#   make test ARGS="-k ring -x"     arguments for pytest (or for the demo or the benchmarks)
#   make demo EXTRAS=cuda13         with CuPy for a CUDA 13 build of torch (cuda12: for CUDA 12)
#   make PYTHON=/path/to/python     which interpreter .venv is made from

comma := ,
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
PYTHON ?=
EXTRAS ?=
ARGS ?=

.PHONY: help venv demo test lint bench clean

help:
	@echo 'make demo    train a small classifier through GPUPrefetcher (examples/quickstart.py)'
	@echo 'make test    the test suite, in two processes; GPU tests run where there is a GPU'
	@echo 'make lint    ruff, mypy, codespell'
	@echo 'make bench   the quick benchmarks'
	@echo 'make venv    the virtual environment alone'
	@echo 'make clean   remove the virtual environment and caches'

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(or $(ARGS),--numprocesses=2 --dist=loadfile)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

bench: $(STAMP)
	$(BIN)/python -m benchmarks --quick $(ARGS)

venv: $(STAMP)

# ensurepip: some distributions split it off, and a venv without pip is of no use here.
$(STAMP): pyproject.toml requirements/test.txt hatch_build.py prefetchpipe/native/copies.c
	@set -e; \
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$("$$python" --version)"; \
	        "$$python" -m venv $(VENV); \
	        exit 0; \
	    fi; \
	done; \
	echo "error: no Python >= 3.11 with its venv module found (tried $(or $(PYTHON),python3 python3.13 python3.12 python3.11));" >&2; \
	echo "       install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements/test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	    --constraint requirements/test.txt --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

clean:
	rm -rf prefetchpipe/native/_copies.so* $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
