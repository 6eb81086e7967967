# make demo, make test: each sets up .venv by itself, at the first run or when pyproject.toml changed.
# PY=/path/to/python chooses the interpreter to build it on, MOR_TORCH="..." the torch that pip installs there;
# SOURCE=file is the text that the demo is trained on.
PY ?=
VPY := .venv/bin/python
# two workers of one thread each; a machine without network may lack pytest-xdist
WORKERS = $(shell $(VPY) -c "import xdist; print('-n', 2)" 2>/dev/null)
# OpenMP's spinning threads take milliseconds of a tiny operation on a busy machine
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint env clean
.DEFAULT_GOAL := test

demo: env
	$(VPY) -m mor_kernels train runs/demo --preset demo --fresh $(if $(SOURCE),--source "$(SOURCE)")
	$(VPY) -m mor_kernels generate runs/demo --depth --prompt "The statement is used"

test: env
	OMP_NUM_THREADS=1 $(VPY) -m pytest -q tests $(WORKERS)

lint: env
	$(VPY) -m ruff check .

env:
	@$(or $(PY),python3) tools/bootstrap.py $(if $(PY),,--find)

clean:
	rm -rf .venv build dist *.egg-info
