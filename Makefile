# Each target makes the environment it needs, once. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Options for pytest, such as `make test PYTEST_OPTIONS="-x -k resize"`.
PYTEST_OPTIONS ?=
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Many tests begin a process that imports torch: its modules are compiled to bytecode once.
unexport PYTHONDONTWRITEBYTECODE
# The simulated device has to be there before torch is imported, so it has processes of its own.
ON_DEVICE := PYTHONPATH=tests/device/startup
# The tests marked cuda that need neither inductor's code for a GPU nor processes of their own.
MARKED := tests/rollback/test_cuda.py tests/transactions/test_transaction_cuda.py \
	tests/assignment/test_assign.py
SWEEPS := FAKE_DEVICE=cuda $(ON_DEVICE) $(PYTEST) --dist load -m "cuda and slow" tests/device
# Options for the doctor, such as `make doctor DOCTOR_OPTIONS="--family memory"`.
DOCTOR_OPTIONS ?=
# How long `make gpu` may take, and where its results go.
MINUTES ?= 9
OUT ?= gpu-results

# Not compiled to bytecode beforehand: most modules of these packages are never imported.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo doctor test test-all test-slow test-device lint types docs dist gpu format matrix clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/test.stamp ## show six failures, in PyTorch and with torchguard
	$(BIN)/python -m torchguard demo

doctor: $(VENV)/test.stamp ## show which defects torch has and whether the guards close them
	$(BIN)/python -m torchguard doctor $(DOCTOR_OPTIONS)

test: $(VENV)/test.stamp ## run the tests, each promise once: six minutes on two cores
	$(PYTEST) -m "not slow" $(PYTEST_OPTIONS)

test-all: $(VENV)/test.stamp test-device ## run everything: sweeps, models, ranks, pages, the doctor
	$(PYTEST) $(PYTEST_OPTIONS)
	$(SWEEPS) $(PYTEST_OPTIONS)

test-slow: $(VENV)/test.stamp ## run what test-all has and test has not, but for a device's sweeps
	$(PYTEST) -m slow $(PYTEST_OPTIONS)

test-device: $(VENV)/test.stamp ## run what needs a GPU on a simulated device, which is compiled once
	FAKE_DEVICE=cuda $(ON_DEVICE) $(PYTEST) -m "cuda and not slow" tests/device $(MARKED) $(PYTEST_OPTIONS)
	FAKE_DEVICE=private $(ON_DEVICE) $(PYTEST) tests/device $(PYTEST_OPTIONS)

lint: $(VENV)/dev.stamp ## check style and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/dev.stamp ## check types: mypy everywhere, pyright on a program that uses the API
	$(BIN)/python -m mypy
	$(BIN)/python -m basedpyright --pythonpath $(BIN)/python

docs: $(VENV)/dev.stamp ## build the documentation into site/; a broken link fails
	$(BIN)/python -m sphinx --quiet --fail-on-warning -b html docs site

dist: $(VENV)/dev.stamp ## build wheel and source distribution into dist/, the same bytes each time
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

gpu: ## make every record that needs a GPU: MINUTES=9 OUT=gpu-results; needs no environment of ours
	$(PYTHON) -m benchmarks gpu --minutes $(MINUTES) --out $(OUT)

format: $(VENV)/dev.stamp ## repair what `make lint` can repair by itself
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

matrix: $(VENV)/dev.stamp ## run the suite on six versions of torch and four of Python (gigabytes each)
	$(BIN)/python -m nox -s matrix pythons

clean: ## remove the environment and what tools have left behind
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is made last: an installation that was interrupted is begun again.
$(VENV)/test.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(INSTALL) -e '.[dev]'
	touch $@
