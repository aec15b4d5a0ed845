# make demo   install, build the toy, train it by RL, evaluate it; writes demo/summary.json and demo/curve.png
# make test   install, run the CPU tests
VENV ?= .venv
PYTHON ?= python3
PY = $(VENV)/bin/python
DEMO_ARGS ?=

.PHONY: demo test lint bench clean

# torch alone first: a later requirement must find it in place, or pip may fetch another build of it
$(VENV)/.run: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(VENV)/.run
	$(PY) demo.py run --out demo $(DEMO_ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest

lint: $(VENV)/.dev
	$(PY) -m ruff check .

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/packing.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/balance.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/policy_head.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) benchmarks/vs_trl.py

clean:
	rm -rf demo .pytest_cache .ruff_cache .hypothesis
