# Commands on a fresh machine with git, make, a C++ compiler and Python 3.11 or 3.12: `make quickstart`, `make quickstart-agent` and `make test`.

SEED ?= 0
ARGS ?=
WORKERS ?= 2
DEVICE ?= auto
# The first that runs: 3.12 with a GPU, as Megatron-Core wants; 3.11 without, as continuous integration does.
GPU := $(if $(filter auto,$(DEVICE)),$(wildcard /proc/driver/nvidia/version),$(filter gpu,$(DEVICE)))
PYTHON ?= $(shell for python in $(if $(GPU),python3.12 python3.11,python3.11 python3.12) python3 python; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& { echo $$python; break; }; done)

# Tests that make their tensors on whatever device PyTorch finds.
HOSTCUDA_TESTS := tests/hostcuda tests/reshard/test_sync.py $(addprefix tests/megatron/test_,values.py lora.py experts.py) \
	$(addprefix tests/gpu/test_,copier.py cuda_ipc.py policy.py offload.py two_gpus.py)

ENV := .venv/.ready
SOURCES := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-agent test test-unit test-hostcuda test-nightly test-stress docs clean

help:
	@echo 'make quickstart [SEED=0] [ARGS="..."]   train the quickstart model: SFT, then GRPO (ARGS go to tools/quickstart.py)'
	@echo 'make quickstart-agent [SEED=0] [ARGS="..."]   train a model to use a calculator in several turns'
	@echo 'make test [ARGS="tests/reshard -k copy"]  run the test suite, or the part of it that ARGS names (ARGS go to pytest)'
	@echo 'make test-unit                          run the tests that start no process, but for kernels in the interpreter'
	@echo 'make test-hostcuda                      run what needs CUDA on an emulated device, which is built first (a minute)'
	@echo 'make test-nightly [NIGHTLY_PART=3]      run a part of the long tail: every layout, real size, faults; 20 GB of memory'
	@echo 'make test-stress [ARGS="tests/runtime"]  run what has processes, signals or deadlines 20 times in each of four conditions;'
	@echo '                                        goes on where it was interrupted (tools/stress_tests.py says how)'
	@echo 'make docs                               build the documentation into build/docs/; a broken link is an error'
	@echo 'make clean                              remove the environment and everything that was built; runs/ stays'
	@echo ''
	@echo 'The first of them makes .venv and installs into it. DEVICE=cpu|gpu chooses what to install (default: gpu if there is one),'
	@echo 'PYTHON=path names the interpreter (3.11 or 3.12), MEGARL_CUDA=AUTO|ON|OFF whether the extension is built for CUDA.'
	@echo 'WORKERS=4 runs the tests in four processes (default: 2; 0: in one, which a debugger needs).'

quickstart: $(ENV)
	.venv/bin/python tools/quickstart.py --seed $(SEED) $(ARGS)

quickstart-agent: $(ENV)
	.venv/bin/python tools/quickstart.py --agent --seed $(SEED) $(ARGS)

test: $(ENV)
	.venv/bin/python -m pytest $(or $(ARGS),tests) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-unit: $(ENV)
	.venv/bin/python -m pytest $(or $(ARGS),tests) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "unit and not nightly and not interpreted"

# Four devices in host memory instead of GPUs (docs/emulated_gpu.md). The Triton kernels cannot run there.
test-hostcuda: $(ENV)
	HOSTCUDA_DEVICES=4 MEGARL_KERNELS=torch .venv/bin/python tests/hostcuda/build.py \
		.venv/bin/python -m pytest $(or $(ARGS),$(HOSTCUDA_TESTS)) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-nightly: $(ENV)
	.venv/bin/python tools/nightly.py $(ARGS)

test-stress: $(ENV)
	.venv/bin/python tools/stress_tests.py $(ARGS)

docs: $(ENV)
	.venv/bin/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs
	@echo 'build/docs/index.html'

# The stamp is touched by setup_env.py, and only after everything is in place.
$(ENV): tools/setup_env.py $(SOURCES)
	@test -n "$(PYTHON)" || { echo 'megarl needs Python 3.11 or 3.12 and found neither (one without venv does not count). Install one, or name it: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py --device $(DEVICE)

clean:
	rm -rf .venv build dist *.egg-info megarl/_C.*.so .pytest_cache .ruff_cache .mypy_cache
	find megarl triton_kernels tests tools -name __pycache__ -prune -exec rm -rf {} +
