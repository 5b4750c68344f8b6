# Both main targets set up everything they need in .venv: no GPU, no account, no further step.
PYTHON ?= python3
VENV := .venv
# Another release of torch than that of constraints.txt, for a VENV of its own.
TORCH ?=
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo demo-sft demo-vlm demo-omni test test-all test-architectures test-releases lint constraints bench-cpu clean

demo: $(VENV)/ready
	$(BIN)/python -m demos.text

demo-sft: $(VENV)/ready
	$(BIN)/python -m demos.sft

demo-vlm: $(VENV)/ready
	$(BIN)/python -m demos.vlm

demo-omni: $(VENV)/ready
	$(BIN)/python -m demos.omni

# More workers than cores, since many tests wait for other processes; at most four because of memory.
# PYTEST_ARGS="-n 0" runs one test after another.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); [ $$cores -lt 4 ] && echo $$((cores + 2)) || echo 4)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
MARKS ?= not gpu and not multigpu and not slow

test: $(VENV)/ready-dev
	$(PYTEST) -m "$(MARKS)" $(PYTEST_ARGS)

# Every test, then the numerical ones as CPUs without AVX-512 and without AVX2 compute them, with one and two threads:
# the code that PyTorch, oneDNN, MKL and NumPy's OpenBLAS (dots in Triton's interpreter) choose for such CPUs. Without
# FP8: PyTorch multiplies it with oneDNN wherever the CPU itself has AMX.
NUMERICAL = tests/ops tests/optim tests/models tests/verify tests/distributed tests/trainer/test_isolation.py
OLDER_CPUS = ATEN_CPU_CAPABILITY=avx2,OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=default,OPENBLAS_CORETYPE=Nehalem

test-all: $(VENV)/ready-dev
	$(PYTEST) -m "not gpu and not multigpu" $(PYTEST_ARGS)
	for cpu in $(OLDER_CPUS); do for threads in 1 2; do \
		echo "numerical tests with $$cpu and $$threads threads"; \
		env $$(echo $$cpu | tr , ' ') ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=$$threads \
			$(PYTEST) -m "not gpu and not multigpu" -k "not fp8" $(PYTEST_ARGS) $(NUMERICAL) || exit 1; \
	done; done

# Checks tiny models of every supported architecture (minutes), and writes what docs/architectures.md shows.
test-architectures: $(VENV)/ready-dev
	TRITON_INTERPRET=1 $(BIN)/python benchmarks/check_architectures.py
	$(BIN)/python benchmarks/generate_docs.py

# The same for older releases of Transformers, without writing anything, also for model types with images, video or audio;
# kernels with the Triton of torch 2.11, and the tests with the oldest torch and a newer one.
RELEASES ?= 5.9.0 5.17.0 5.23.0
TRITON_RELEASES ?= 3.6.0
TORCH_RELEASES ?= 2.11.0 2.15.0

test-releases: $(VENV)/ready-dev
	for release in $(TRITON_RELEASES); do \
		folder=$(VENV)/triton-$$release; \
		[ -d $$folder ] || $(BIN)/python -m pip install --quiet --no-deps --target $$folder triton==$$release || exit 1; \
		PYTHONPATH=$$folder $(BIN)/python -m pytest -q -m slow tests/ops/test_compile_for_gpus.py || exit 1; \
	done
	for release in $(RELEASES); do \
		folder=$(VENV)/transformers-$$release; \
		[ -d $$folder ] || $(BIN)/python -m pip install --quiet --target $$folder transformers==$$release || exit 1; \
		PYTHONPATH=$$folder TRITON_INTERPRET=1 $(BIN)/python benchmarks/check_architectures.py --print-only || exit 1; \
		PYTHONPATH=$$folder $(BIN)/python benchmarks/check_media.py --print-only || exit 1; \
		PYTHONPATH=$$folder $(PYTEST) tests/models/test_omni.py || exit 1; \
	done
	for release in $(TORCH_RELEASES); do \
		$(MAKE) test VENV=$(VENV)/torch-$$release TORCH=$$release || exit 1; \
	done

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/mypy --explicit-package-bases -p demos
	$(BIN)/lint-imports
	$(BIN)/patchgen --check

bench-cpu: $(VENV)/ready-dev
	$(BIN)/python benchmarks/cpu.py

# A recent pip resolves in half the time. torch comes first and alone, so that nothing that depends on it picks another
# build; it is compiled while the rest is installed.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile -c $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# pip compiles one file after another. What is left out is compiled when it is imported; some files are not Python 3.
NOT_COMPILED = /tests?/|/transformers/models/|/(fontTools|mypyc?|pip|pygments|setuptools|torchgen)/
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib src || true

# The interpreter of Triton 3.6, which torch 2.11 installs, fails with NumPy 2.4.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' -e 's/^numpy==.*/numpy<2.4/' constraints.txt > $(VENV)/constraints.txt)
	$(INSTALL) --upgrade pip
	$(INSTALL) torch
	touch $@

$(VENV)/ready: pyproject.toml $(VENV)/torch
	$(COMPILE) & $(INSTALL) -e . || exit 1; wait
	$(COMPILE)
	touch $@

$(VENV)/ready-dev: pyproject.toml $(VENV)/torch
	$(COMPILE) & $(INSTALL) -e ".[dev]" || exit 1; wait
	$(COMPILE)
	touch $(VENV)/ready $@

constraints:
	$(BIN)/python -m pip freeze --all --exclude setuptools --exclude-editable | sed -e '1i# The versions that CI and the demo install. Regenerate with: make constraints' -e 's/+cpu//' > constraints.txt

clean:
	rm -rf $(VENV) outputs
