# Both main targets set up everything they need in .venv: no GPU, no account, no further step.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint constraints bench-cpu clean

demo: $(VENV)/ready
	$(BIN)/python -m opslot.trainer.demo

# A worker a core, up to four for the memory's sake; PYTEST_ARGS="-n 0" runs one test after another.
test: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m "not gpu and not multigpu" -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/patchgen --check

bench-cpu: $(VENV)/ready-dev
	$(BIN)/python benchmarks/cpu.py

# torch comes first and alone, so that nothing that depends on it picks another build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

constraints:
	$(BIN)/python -m pip freeze --exclude-editable | sed -e '1i# The versions that CI and the demo install. Regenerate with: make constraints' -e 's/+cpu//' > constraints.txt

clean:
	rm -rf $(VENV) outputs
