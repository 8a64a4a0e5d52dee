# Every command of this repository, by one name. On a fresh machine with Python 3.11 and nothing
# else, `make demo` and `make test` set up .venv by themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Installed first and alone: the project never asks for torch, so no step after it can bring
# another build. Set TORCH to have your accelerator's.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The ends of the range that pyproject.toml allows (tests/test_packaging.py compares them).
PROTOBUF_OLDEST := grpcio==1.71.2 protobuf==5.29.1
PROTOBUF_NEWEST := grpcio protobuf<8

.NOTPARALLEL:
.PHONY: venv demo test check lint format types imports proto proto-check test-protobuf pytest bench clean

test: check pytest

check: lint types imports proto-check test-protobuf

venv: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[writer,dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python demo/main_job.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

proto: $(READY)
	$(BIN)/python proto/generate.py

proto-check: $(READY)
	$(BIN)/python proto/generate.py --check

# Generated code refuses to import under a protobuf or grpcio that it does not know.
test-protobuf: .venv-protobuf-oldest/.ready .venv-protobuf-newest/.ready
	PYTHONPATH=proto .venv-protobuf-oldest/bin/python tests/proto/one_rpc.py
	PYTHONPATH=proto .venv-protobuf-newest/bin/python tests/proto/one_rpc.py

.venv-protobuf-oldest/.ready: PINS := $(PROTOBUF_OLDEST)
.venv-protobuf-newest/.ready: PINS := $(PROTOBUF_NEWEST)
.venv-protobuf-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade $(foreach pin,$(PINS),"$(pin)")
	touch $@

pytest: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[peers]"
	$(BIN)/python benchmarks/stall.py

clean:
	rm -rf $(VENV) .venv-protobuf-oldest .venv-protobuf-newest proto/.protoc
