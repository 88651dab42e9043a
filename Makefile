# Each target makes its own virtual environment; nothing but Python 3.11+ and make is needed beforehand.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# The S3 test server keeps its own environment: its dependencies and fsspec's S3 client do not go together.
MOTO := .venvs/moto
# LeRobot, whose loaders are measured beside reelray's, needs other versions of what both use.
LEROBOT := .venvs/lerobot
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt

.PHONY: demo demo-prefeature test slow lint bench figures wheel clean

demo: $(VENV)/.run
	$(BIN)/reelray demo --output outputs/demo

demo-prefeature: $(VENV)/.run $(MOTO)/.ready
	$(BIN)/python -m train_integration.demo_prefeature --s3-server $(MOTO)/bin/moto_server

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

slow: $(VENV)/.dev $(MOTO)/.ready
	$(BIN)/python -m pytest -q -m "slow and not soak" --timeout 1200

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.run
	$(BIN)/python -m benchmarks.stream

# Runs every benchmark (about three quarters of an hour) and writes the tables of the documents anew.
figures: $(VENV)/.run $(VENV)/.torchcodec $(LEROBOT)/.ready
	$(BIN)/python -m benchmarks

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel --outdir dist

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "reelray needs Python 3.11 to 3.13; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) -e '.[s3,viz]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev,viz]'
	touch $@ $(VENV)/.run

# A decoder beside PyAV, which the suites of decoders also run over where it can be loaded: that takes FFmpeg's libraries (Debian: ffmpeg).
$(VENV)/.torchcodec: $(VENV)/.run
	$(PIP) -e '.[torchcodec]'
	touch $@

$(MOTO)/.ready: | $(VENV)/bin/python
	$(PYTHON) -m venv $(MOTO)
	$(MOTO)/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server,s3]'
	touch $@

$(LEROBOT)/.ready: benchmarks/lerobot_env.py | $(VENV)/.run
	$(BIN)/python -m benchmarks.lerobot_env $(LEROBOT)
	touch $@

clean:
	rm -rf dist build outputs .pytest_cache .hypothesis .ruff_cache
