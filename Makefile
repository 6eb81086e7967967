# make demo, make test: each sets up .venv by itself, at the first run or when pyproject.toml or a CUDA kernel changed.
# PY=/path/to/python chooses the interpreter to build it on, MOR_TORCH="..." the torch that pip installs there;
# SOURCE=file is the text that the demo is trained on; MOR_CUDA=0 leaves the CUDA kernels out, see setup.py.
# make emulate: the CUDA kernels' tests on a CPU, by tests/emulator; make races: under g++'s ThreadSanitizer, which stops
# at the first race between threads of a block.
# make fuzz: every hypothesis test with random examples, MINUTES in all; JSON=file writes the table, WORKERS="-n 12" and
# ARGS="tests/ops" are pytest's.
# make docs: the pages in build/docs, where a warning is an error.
# make aot: the Triton kernels, compiled for A100 and H100 without a GPU, and what became of them; TRITON=3.6.0 does it
# with that Triton, in a folder of its own, in place of the installed one.
# make package: the distributions, what they hold, and their use on the oldest and newest Python and torch, which pip
# downloads, gigabytes each; ON="3.11:2.13.0 3.12:" does it on these (Python:torch).
PY ?=
VPY := .venv/bin/python
# two workers of one thread each; a machine without network may lack pytest-xdist
WORKERS = $(shell $(VPY) -c "import xdist; print('-n', 2)" 2>/dev/null)
# OpenMP's spinning threads take milliseconds of a tiny operation on a busy machine
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test emulate races fuzz lint docs aot package env clean
.DEFAULT_GOAL := test

demo: env
	$(VPY) -m mor_kernels train runs/demo --preset demo --fresh $(if $(SOURCE),--source "$(SOURCE)")
	$(VPY) -m mor_kernels generate runs/demo --depth --prompt "The statement is used"

test: env
	OMP_NUM_THREADS=1 $(VPY) -m pytest -q tests $(WORKERS)

emulate: env
	MOR_EMULATE=1 OMP_NUM_THREADS=1 $(VPY) -m pytest -q tests/ops tests/decode tests/model/test_backends.py -k cpu-cuda \
	$(WORKERS)

races: env
	LD_PRELOAD=$$(g++ -print-file-name=libtsan.so) TSAN_OPTIONS="halt_on_error=1 log_path=stderr" MOR_EMULATE=races \
	OMP_NUM_THREADS=1 setarch -R $(VPY) -m pytest -q -s tests/ops tests/decode -k "cpu-cuda and not many_lanes"

fuzz: env
	OMP_NUM_THREADS=1 $(VPY) tests/fuzz.py $(or $(MINUTES),10) $(if $(JSON),--json "$(JSON)") $(WORKERS) $(ARGS)

lint: env
	$(VPY) -m ruff check . && $(VPY) -m ruff format --check -q mor_kernels/ops bench tests/ops tests/bench
	$(VPY) -m mypy

docs: env
	OMP_NUM_THREADS=1 $(VPY) -m sphinx -q -W --keep-going -b html docs build/docs

aot: env $(if $(TRITON),build/triton-$(TRITON))
	PYTHONPATH=$(if $(TRITON),build/triton-$(TRITON):). $(VPY) tests/aot.py

package: env
	$(VPY) -m tools.check_package $(ON)

build/triton-%: | env
	rm -rf $@.part
	$(VPY) -m pip install -q --no-deps --target $@.part triton==$*
	mv $@.part $@

env:
	@$(or $(PY),python3) tools/bootstrap.py $(if $(PY),,--find)

clean:
	rm -rf .venv build dist *.egg-info mor_kernels/_C*.so
