# Two commands do everything on a fresh machine: `make demo` and `make test`.
# PY=python3 uses an interpreter that has everything already and leaves .venv alone.
PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
RECEIPT_DIR ?= validation/results
JOBS ?= 2
# What `make test` takes on two idle cores, as the README and docs/explain/validation.rst have it.
MINUTES := 11
# Processes of the GPU tests: with about as many as cores they take minutes, not hours.
GPU_JOBS ?= 1
# A test that hangs is not waited for: after 5 minutes its stack is shown, after 10 its process ends.
WATCHED := -o faulthandler_timeout=300 --timeout 600 --timeout-method thread --durations 25
# BLAS has one thread in each process: more of them than cores wait for each other, and a reference
# in float64 then takes up to twenty times as long.
# Bytecode is written, even where the environment says not to: many tests start Python anew. Each
# process has half of the tests in their order, so that few files are begun by both.
PYTEST = OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) \
  -p tests.support.gc_plugin --dist worksteal $(WATCHED)
GPU_RUN := build/gpu-run
CLANG_FORMAT := $(if $(findstring /,$(PY)),$(dir $(PY)))clang-format
NEEDS_GXX = $(if $(shell command -v g++),g++ is there: kernels run on the CPU,\
  There is no g++: tests that run kernels on the CPU are skipped)
KERNELS := $(wildcard cuda_src/*/*.cu cuda_src/*/*.cuh ptx/*.cuh validation/emulator/*.?pp \
  validation/emulator/ptx/*.cuh)
# Python compiles what it imports, when it does: pip would compile all of SciPy in one process, 9 s.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

# Stamps carry the folder's checksum: an editable install is bound to the folder that it was made in.
ifeq ($(PY),$(VENV)/bin/python)
HERE := $(shell pwd -P | cksum | cut -d ' ' -f 1)
DEMO_READY := $(VENV)/.demo-$(HERE)
TEST_READY := $(VENV)/.test-$(HERE)
DOCS_READY := $(VENV)/.docs-$(HERE)
endif
# In this order: the last one decides which CUDA is there.
GPU_READY := $(TEST_READY) $(DEMO_READY)

.PHONY: demo test test-all test-gpu gpu-tests gpu-tests-again gpu-sanitize gpu-receipt bench docs docs-pictures lint
.PHONY: format compile-all wheel announce receipt-pending
.NOTPARALLEL:
.DELETE_ON_ERROR:

## the main job: denoise a photograph, write demo.png
demo: $(DEMO_READY)
	$(PY) -m fa_cupy demo

## lint, and of all that can be tested without a GPU what takes minutes on two cores
test: announce lint
	FA_CUPY_HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not gpu and not slow and not long"
	$(PY) -m validation.receipt check

## lint, and all that can be tested without a GPU: every row and every planted bug
test-all: announce lint
	$(PYTEST) -m "not gpu and not slow"
	$(PY) -m validation.receipt check

announce:
	@echo "Tests without a GPU: 'make test' takes about $(MINUTES) minutes on two idle cores, 'make test-all' 48,"
	@echo "and the first time as long as downloads take. $(NEEDS_GXX)."
	@echo "Tests with PyTorch or JAX are skipped where these are not installed."

## everything that needs a GPU; writes the receipt, of a failed run too
test-gpu: gpu-tests gpu-sanitize gpu-receipt

# Only the plugins that are named: an environment that has everything may have some that interfere.
SPREAD = -p xdist.plugin -p tests.support.devices_plugin -n $(GPU_JOBS) --dist load --maxschedchunk 1
GPU_PYTEST = FA_CUPY_HYPOTHESIS_PROFILE=gpu PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 FA_CUPY_SPREAD=1 \
  OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -m gpu -p _hypothesis_pytestplugin \
  -p tests.support.gc_plugin -p tests.support.receipt_plugin --durations 25
gpu-tests: $(GPU_READY)
	rm -rf $(GPU_RUN) && mkdir -p $(GPU_RUN)
	-$(GPU_PYTEST) $(if $(filter-out 1,$(GPU_JOBS)),$(SPREAD)) --receipt $(GPU_RUN)/tests.json

## GPU tests that have failed, again, where the machine was to blame; then gpu-sanitize, gpu-receipt
gpu-tests-again: $(GPU_READY)
	$(PY) -m validation.receipt failed $(GPU_RUN) > $(GPU_RUN)/failed.txt
	-$(GPU_PYTEST) --receipt $(GPU_RUN)/again.json @$(GPU_RUN)/failed.txt

gpu-sanitize: $(GPU_READY)
	-$(PY) -m validation sanitize --json $(GPU_RUN)/sanitizer.json

gpu-receipt: $(GPU_READY)
	$(PY) -m validation.receipt write $(GPU_RUN) $(RECEIPT_DIR)/receipt.json

## measure against the peers that can be imported, and renew the README's table
bench: $(GPU_READY)
	$(PY) -m validation bench
	$(PY) -m validation readme

## the pages, with the pictures of the gallery, in docs/_build/html
docs: $(DOCS_READY)
	OPENBLAS_NUM_THREADS=1 $(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

## their pictures at 1280 and 390 px, in docs/_build/pictures; needs Chromium
docs-pictures: docs
	$(PY) docs/pictures.py

lint: $(TEST_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(KERNELS)

format: $(TEST_READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(KERNELS)

## compile every kernel for every further target
compile-all: $(TEST_READY)
	$(PY) -m pytest -m "slow and not gpu" tests/kernels/test_compile.py

wheel: $(TEST_READY)
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

## mark the tree where no GPU could be had: make receipt-pending WHY="..."
receipt-pending:
	$(PYTHON) -m validation.receipt pending "$$WHY"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# For a CUDA 12 driver the two installs want different compilers, so there each undoes the other's stamp.
$(VENV)/.demo-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	extra=$$($(PYTHON) -I fa_cupy/cli/cuda_extra.py) && $(PIP) --editable ".[plot$${extra:+,$$extra}]" && \
	  if [ "$$extra" = cuda12 ]; then rm -f $(VENV)/.test-*; fi
	touch $@

$(VENV)/.test-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable ".[test]"
	if [ "$$($(PYTHON) -I fa_cupy/cli/cuda_extra.py)" = cuda12 ]; then rm -f $(VENV)/.demo-*; fi
	touch $@

$(VENV)/.docs-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable ".[docs]"
	touch $@
