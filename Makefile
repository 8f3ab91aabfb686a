# Everything runs in the active virtual environment, or in .venv, which is made when there is none.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.unsoftmax-installed
DEMO ?= runs/demo
# A machine without an NVIDIA driver takes the CPU build of torch.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo "-c constraints-cpu.txt torch")

.PHONY: demo test test-all lint bench install
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/unsoftmax demo $(DEMO)

test: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/python benchmarks/check_gsa.py
	$(BIN)/python benchmarks/check_onehot.py
	$(BIN)/python benchmarks/check_polysketch.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python %d.%d is too old: unsoftmax needs 3.11 or newer; name one with make PYTHON=python3.11" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $@
