# make demo | make test | make slow | make lint | make accept | make wheel | make hooks: each does its whole set-up on a fresh machine, and
# does it again only when pyproject.toml changed. Torch goes in first and pinned, so that nothing else chooses it.

TORCH ?= torch==2.13.0
PINS ?=
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
MODERN := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: demo test suite slow oldest lint wheel hooks accept clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/python examples/demo.py

# Side by side where pytest-xdist could be had; the suite is the same without it.
PARALLEL = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && echo '-n auto --maxprocesses 4 --dist worksteal')

test: lint suite

suite: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

# What tests/slow.txt lists and what is marked so: a third of all the time. Then tests of every kind with the torch that users have,
# some parts of which are faster ones elsewhere (tests/support/faster_torch.py).
slow: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m slow
	$(BIN)/python -m pytest $(PARALLEL) --unpatched @tests/unpatched.txt

# All tests with the oldest versions that pyproject.toml admits; takes several GB, as that torch comes with CUDA alone.
# Its Triton's interpreter does not run with a newer numpy.
oldest:
	$(MAKE) suite slow VENV=.venv-oldest TORCH='torch==2.11.0' PINS='transformers==5.17.0 numpy~=2.3.0'

# The real thing on a GPU, or slowly on a CPU: benchmarks/ACCEPT.md says what runs. make accept ARGS='--only llama' for a part.
accept: $(READY)
	$(BIN)/python -m benchmarks.accept $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The wheel, tried away from the checkout: what it forgot to pack (a module, a kernel's template) fails here.
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target dist/unpacked dist/*.whl
	cd dist && PYTHONPATH=unpacked ../$(BIN)/python -m kvcompile explain hf:llama --scheme int4 --strict
	cd dist && PYTHONPATH=unpacked ../$(BIN)/python -m kvcompile dump hf:llama --scheme int4 --stage triton -o llama.py

# Git runs ruff and mypy on what is committed from now on, and looks at the subject's length.
hooks: $(READY)
	$(BIN)/pre-commit install

$(READY): pyproject.toml
	@test -x $(BIN)/python || { \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    $$python -c '$(MODERN)' 2>/dev/null && exec $$python -m venv $(VENV); \
	  done; \
	  echo 'kvcompile needs Python 3.11 or newer, found none: install one, or say make PYTHON=/path/to/python' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet '$(TORCH)' $(PINS) --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet 'pytest-xdist>=3.6'
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
