# gpunetio: everything runs in .venv, which the first call makes. Needs python3 (3.11 or later), make and a package index.
#
#   make demo     install the package and put README.md through a loopback queue pair of the software NIC
#   make test     the quick suite             (PYTEST_ARGS="-m slow", PYTEST_ARGS="-n0 tests/nic -x", ...)
#   make lint     ruff and pyright
#   make mutants  is a mistake in the code noticed by a test? Hours.  (MUTANTS_ARGS="--only python --sample 20", ...)
#   make bench    the benchmarks of the CPU side (needs g++)
#   make docs     the site of the documentation, in build/docs
#   make lock     pin the dependencies anew
#   make clean    remove all that make made

PYTHON ?= python3
PYTEST_ARGS ?=
MUTANTS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Hashed pins for the dependencies; the package itself comes from the checkout, built by the pinned hatchling.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore
PINS := $(INSTALL) --require-hashes -r
EDITABLE := $(INSTALL) --no-deps --no-build-isolation -e .
LOCK := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --group build --generate-hashes \
	--no-emit-index-url --custom-compile-command "make lock" --quiet

# A container may forbid bytecode files: then each of the hundreds of processes of the tests would parse the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint mutants bench docs lock clean
.DEFAULT_GOAL := demo

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "gpunetio needs Python 3.11 or later as '$(PYTHON)'; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot make virtual environments; install python3-venv (Debian, Ubuntu) or another Python" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: requirements.txt pyproject.toml | $(VENV)/.made
	@echo "installing gpunetio and what it needs"
	@$(PINS) requirements.txt
	@$(EDITABLE)
	@touch $@

$(VENV)/.docs: requirements-docs.txt pyproject.toml | $(VENV)/.made
	@echo "installing gpunetio and Sphinx"
	@$(PINS) requirements-docs.txt
	@$(EDITABLE)
	@touch $@

$(VENV)/.dev: requirements-dev.txt pyproject.toml | $(VENV)/.made
	@echo "installing gpunetio, its test tools and CUDA's, which check compiled kernels (about 400 MB)"
	@$(PINS) requirements-dev.txt
	@$(EDITABLE)
	@touch $@

$(VENV)/.interop: requirements-interop.txt $(VENV)/.dev
	@echo "installing foreign programs for the interop suite (about 110 MB)"
	@$(INSTALL) --no-deps --require-hashes -r requirements-interop.txt
	@touch $@

$(VENV)/.mutants: requirements-mutants.txt pyproject.toml | $(VENV)/.made
	@echo "installing gpunetio, its test tools and Cosmic Ray"
	@$(PINS) requirements-mutants.txt
	@$(EDITABLE)
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/gpunetio put_bw --loopback --payload README.md

# Two processes for each core (tests/rigs/workers.py), each with whole files: their tests share fixtures and compiled kernels.
test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

mutants: $(VENV)/.mutants
	@$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

bench: $(VENV)/.runtime
	@$(BIN)/python benchmarks/engine.py
	@$(BIN)/python benchmarks/startup.py

# Part of docs/setup.md is made from the doctor's checks. A link or a name that leads nowhere is an error.
docs: $(VENV)/.docs
	@$(BIN)/python -m gpunetio.doctor.report.guide docs/setup.md
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs
	@echo "built build/docs/index.html"

# The others take the versions of requirements-dev.txt, so that all agree in one .venv.
lock: $(VENV)/.dev
	@$(LOCK) --upgrade --extra dev -o requirements-dev.txt
	@$(LOCK) --constraint requirements-dev.txt -o requirements.txt
	@$(LOCK) --constraint requirements-dev.txt --extra docs -o requirements-docs.txt
	@$(LOCK) --constraint requirements-dev.txt --extra mutants -o requirements-mutants.txt
	@$(BIN)/uv pip compile --group interop --no-deps --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --custom-compile-command "make lock" --quiet -o requirements-interop.txt
	@! grep -nE '://|file:|^ *-[^-]|^--' requirements*.txt

clean:
	@rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	@find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
