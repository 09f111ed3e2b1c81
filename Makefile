# Everything a person or CI calls. Each target works from a bare clone: it makes .venv,
# installs what it needs and builds the Rust extension, and does nothing twice.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q --no-input
INSTALL = tools/install.py --uv $(UV) --torch $(TORCH)

# It installs what uv.lock says; brought from PyPI if it is not there.
UV ?= $(or $(shell command -v uv 2> /dev/null),$(BIN)/uv)

# The build of torch that `make torch` and `make test` install: cpu, cuda, or auto, which is that for CPUs where there is
# no GPU and PyTorch's index answers.
TORCH ?= auto

RUST_SOURCES := $(shell find rust \( -path rust/fuzz -o -path rust/kv-bench \) -prune -o \( -name '*.rs' -o -name 'Cargo.toml' \) -print) Cargo.toml $(wildcard Cargo.lock)
export PYO3_PYTHON := $(abspath $(BIN)/python)

ENGINE := $(VENV)/.installed-engine
SERVE  := $(VENV)/.installed-serve
WITH_TORCH := $(VENV)/.installed-torch
DEV    := $(VENV)/.installed-dev
DOCS   := $(VENV)/.installed-docs
BUILT  := $(VENV)/.built
LIGHT  := .venv-light
PEERS  := .venv-peers
CLIENTS := .venv-clients
CLUSTER := .venv-cluster
GPU_TESTS := .venv-gpu-tests
GPU_TESTS_TORCH_2_11 := .venv-gpu-tests-torch-2.11
MUTANTS := .venv-mutants
FREE_THREADED := .venv-free-threaded
WHEELS := .venv-wheels
LINT_DEPLOY := .venv-lint-deploy
AUDIT := .venv-audit

# What `make serve` serves and how: a model, options of `pyengine serve`.
SERVE_ARGS ?=

# Options of `make bench`: BENCH='--quick --only decode'; of `make bench-rust`: BENCH=decode.
BENCH ?=

# Options of the adapter of `make conformance`: CONFORMANCE='--promise deduplicates' shows why vLLM makes no such promise.
CONFORMANCE ?=

# Where `make gpu-first-run` runs, and the folder that it writes to.
DEVICE ?= cuda
OUT ?= target/gpu

# The oldest releases of attention libraries that are supported; `make gpu-tests` tries the newest, too.
FLASHINFER ?= 0.6.18
FLASH_ATTN ?= 2.8.3

# Releases that GPU machines have; `make gpu-tests` tries them beside those of uv.lock.
TORCH_2_11 := 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.17.*'

# The file of `make mutants-python`; all of its files without.
FILE ?=

# The Python without a global lock that `make test-free-threaded` runs.
PYTHON_T ?= python3.14t

# The options of `make gpu-tests`.
FAKE_CUDA = -m pytest -m fake_cuda -n auto --dist load tests/fake_cuda --ignore tests/fake_cuda/planner

# How much `make test-aarch64` tries: the processor is emulated.
AARCH64_CASES ?= 6

# Random steps of attention with modelled AMX, where an instruction takes microseconds.
MODELLED_CASES ?= 24
AARCH64_OPS ?= 5000

# The platforms of `make wheels`, all without: PLATFORMS="linux-x86_64 windows-x86_64".
PLATFORMS ?=

# What `make deny` looks at, all without: DENY="licenses bans sources" without the network.
DENY ?=

# Options of `make crates`: CRATES_ARGS=--allow-dirty before a commit.
CRATES_ARGS ?=

# The revision with which `make semver` compares: the tag of the last release, once there is one.
BASELINE ?= HEAD~1

# The oldest Rust.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# How long `make fuzz` looks for differences.
SECONDS ?= 600

.PHONY: help hello serve torch clients cluster cluster-test test test-light test-modelled test-levels test-aarch64 aarch64 test-free-threaded free-threaded check docs wheel soak loom model fuzz mutants mutants-python bench vllm-tests conformance gpu-tests gpu-planner gpu-first-run gpu-first-run-kit bench-rust bench-worst guard guard-update clean
.PHONY: distclean rust-tools valgrind wheels try-wheels try-bare try-musl sdist sbom test-portable test-windows
.PHONY: crates publish-crates msrv semver lint-workflows lint-deploy deny audit release-check release-notes
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

hello: $(ENGINE) $(BUILT) ## a real model answers through the Rust block manager
	@$(BIN)/pyengine generate --chat --temperature 0 --max-tokens 32 "What is the capital of Japan?"

serve: $(SERVE) $(BUILT) ## the embedded model as an OpenAI-compatible server on port 8000; SERVE_ARGS="MODEL --port 8001"
	@$(BIN)/pyengine serve $(SERVE_ARGS)

torch: $(WITH_TORCH) ## torch and transformers for what needs them: CUDA, compile=True, other families; TORCH=cpu or cuda

test: $(DEV) $(BUILT) ## Rust and Python tests
	cargo test --workspace
	@$(MAKE) --no-print-directory test-modelled
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-light: $(LIGHT)/.built ## the Python tests in an environment without torch
	$(LIGHT)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# REQUIRE_ISA asks for processors, not for models.
test-modelled: ## the Rust tests of AMX against a model of its instructions, where the processor has AVX-512 BF16
	ATTENTION_CASES=$(MODELLED_CASES) REQUIRE_ISA= \
	  cargo test -p cpu-kernels --features modelled-tiles -- amx

test-levels: $(DEV) $(BUILT) ## the tests that depend on the processor, at each of its instruction levels
	@$(BIN)/python tools/levels.py

test-aarch64: aarch64 ## Rust tests on an emulated Arm processor; as root it installs the emulator
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
	ATTENTION_CASES=$(AARCH64_CASES) PROPTEST_CASES=$(AARCH64_CASES) KV_OPS=$(AARCH64_OPS) REQUIRE_ISA=plain,neon \
	  cargo test --target aarch64-unknown-linux-gnu -p cpu-kernels -p kv-core -p kv-store -p kv-trace -p suffix-index -p kv-router

test-free-threaded: free-threaded ## the block manager's threads in a Python without a global lock; PYTHON_T=python3.14t
	$(FREE_THREADED)/bin/python -c 'import sys, numpy, pyengine._kv, pyengine._cpu; sys.exit(sys._is_gil_enabled() and "the GIL was enabled by an import")'
	$(FREE_THREADED)/bin/python -m pytest -p no:cacheprovider $(THREADED_TESTS)

clients: $(CLIENTS)/.installed $(BUILT) ## programs of others against the server; the page needs Debian's chromium
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients

check: rust-tools $(DEV) $(BUILT) docs lint-workflows lint-deploy ## formats, lints, types, import rules, the site; changes no file of yours
	cargo fmt --all --check
	cargo fmt --manifest-path rust/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p kv-core -- -D warnings
	RUSTFLAGS="--cfg loom" cargo check -p kv-core --test loom --target-dir target/loom
	RUSTFLAGS="--cfg loom" cargo check -p cpu-kernels --lib --profile test --target-dir target/loom
	PYO3_CONFIG_FILE=$(abspath rust/extension/python3.14t.cfg) cargo clippy -p kv-py -p cpu-py --target-dir target/free-threaded -- -D warnings
	CUSTOM_LIBFUZZER_PATH=none/libfuzzer.a cargo check --locked --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml pyengine._kv pyengine._cpu
	$(BIN)/lint-imports --no-cache
	$(UV) lock --check --quiet

docs: $(DOCS) $(BUILT) ## the documentation as a site in target/site; links are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

cluster: $(CLUSTER)/.installed $(BUILT) ## two replicas on Ray behind the router, under load; a line of figures
	$(CLUSTER)/bin/python -m benches.cluster.show

cluster-test: $(CLUSTER)/.installed $(BUILT) ## replicas on Ray: the same answers, one killed, one more, none left behind
	$(CLUSTER)/bin/python -m pytest -m cluster tests/cluster

wheel: $(DEV) $(BUILT) ## the abi3 wheel in dist/, tried in an empty environment of another Python
	rm -rf dist
	$(BIN)/maturin build --release --out dist
	$(BIN)/python tools/try_wheel.py dist/*.whl

wheels: $(WHEELS)/.installed ## wheels for Linux, macOS and Windows in dist/, checked; PLATFORMS="linux-x86_64 windows-x86_64"
	$(WHEELS)/bin/python -m tools.wheels $(PLATFORMS)

try-wheels: $(WHEELS)/.installed ## those of dist/ are used where this machine can run them; make aarch64 brings an emulator, musl-tools a Python for musl
	$(WHEELS)/bin/python -m tools.try_wheels

try-bare: ## as root: the x86-64 wheel of dist/ in a new Debian with Python alone; block manager, generate, serve
	@command -v debootstrap > /dev/null || { apt-get update && apt-get install -y debootstrap; }
	sh tools/try_bare.sh dist/*manylinux*x86_64.whl

try-musl: ## the musl wheel of dist/ is used in a container; needs docker
	docker run --rm --volume "$(CURDIR):/src:ro" --workdir /src python:3.13-alpine python tools/try_wheel.py dist/*musllinux*.whl

sdist: $(WHEELS)/.installed ## the sources as pip takes them, in dist/
	rm -f dist/*.tar.gz
	$(WHEELS)/bin/python -m maturin sdist --out dist

sbom: ## what the extension in dist/ was built of, in target/sbom
	mkdir -p target/sbom
	$(PYTHON) tools/sbom.py dist > target/sbom/pyengine-kv.cdx.json

test-portable: ## Rust tests of the crates that run on every platform
	$(PYTHON) tools/portable.py test

test-windows: $(WHEELS)/.installed ## the same, built for Windows and run by wine, where it is installed
	mkdir -p target/wine
	$(WHEELS)/bin/python -m ziglang cc -target x86_64-windows-gnu -shared -o target/wine/bcryptprimitives.dll tools/bcryptprimitives.c -ladvapi32
	PATH="$(abspath $(WHEELS)/bin):$$PATH" CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine \
	WINEPATH="Z:$(CURDIR)/target/wine" WINEDEBUG=-all WINEPREFIX="$(CURDIR)/target/wine/prefix" \
	  $(PYTHON) tools/portable.py zigbuild-test x86_64-pc-windows-gnu --tests --no-fail-fast

soak: $(DEV) $(BUILT) ## the long runs: ten million random operations, 2,000 kills, the full token comparison
	KV_OPS=10000000 KILLS=2000 cargo test --release --workspace
	$(BIN)/pytest -m soak

crates: ## are the crates ready for crates.io? documentation without a warning, packages that build
	RUSTDOCFLAGS="-D warnings" $(PYTHON) tools/portable.py doc --no-deps
	$(PYTHON) tools/portable.py package --locked $(CRATES_ARGS)

publish-crates: ## puts the crates on crates.io, in the order in which they need each other
	$(PYTHON) tools/portable.py publish --locked

msrv: ## the crates build and pass their tests with the oldest Rust that Cargo.toml names
	rustup toolchain install --profile minimal $(MSRV)
	$(PYTHON) tools/portable.py +$(MSRV) test --locked --target-dir target/msrv

semver: ## is the API of the crates compatible with that of BASELINE=v1.2.3, as their versions say?
	@command -v cargo-semver-checks > /dev/null || cargo install cargo-semver-checks --locked
	$(PYTHON) tools/portable.py semver-checks --baseline-rev $(BASELINE)

lint-workflows: $(LINT_DEPLOY)/.installed ## errors and weak points of .github
	$(LINT_DEPLOY)/bin/actionlint
	$(LINT_DEPLOY)/bin/zizmor --offline --no-progress -q .github
	$(LINT_DEPLOY)/bin/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml

lint-deploy: $(LINT_DEPLOY)/.installed ## the Dockerfile, compose and Kubernetes files of deploy/ against their schemas
	$(LINT_DEPLOY)/bin/hadolint deploy/Dockerfile
	$(LINT_DEPLOY)/bin/check-jsonschema -q --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(LINT_DEPLOY)/bin/kubernetes-validate --strict deploy/kubernetes/*.yaml

deny: ## licences, sources and known vulnerabilities of the crates; the last need the network
	@command -v cargo-deny > /dev/null || cargo install cargo-deny --locked
	cargo deny --workspace check $(DENY)

audit: $(AUDIT)/.installed ## known vulnerabilities of the Python packages; needs the network
	$(BIN)/python tools/requirements.py serve > $(AUDIT)/serve.txt
	$(BIN)/python tools/requirements.py engine >> $(AUDIT)/serve.txt
	$(BIN)/python tools/requirements.py torch >> $(AUDIT)/serve.txt
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off -r $(AUDIT)/serve.txt

release-check: ## does TAG=v1.2.3 name the version of Cargo.toml and of the changelog?
	$(PYTHON) tools/release.py check $(TAG)

release-notes: ## the changelog's part on TAG=v1.2.3
	$(PYTHON) tools/release.py notes $(TAG)

loom: ## every interleaving of a pin's drop with the manager's work, and of threads in parallel regions
	RUSTFLAGS="--cfg loom" cargo test -p kv-core --release --test loom --target-dir target/loom
	RUSTFLAGS="--cfg loom" cargo test -p cpu-kernels --release --lib --target-dir target/loom region::

model: ## every state of the block manager's model, in larger worlds than make test has; three minutes
	MODEL=full cargo test --release -p kv-model -- --nocapture --test-threads 1

fuzz: ## SECONDS=600 of operations that a fuzzer chooses, and of recordings; needs a C++ compiler
	@command -v cargo-fuzz > /dev/null || cargo install cargo-fuzz --locked
	mkdir -p target/fuzz/corpus
	cargo fuzz run operations --sanitizer none --fuzz-dir rust/fuzz --target-dir target/fuzz \
	  target/fuzz/corpus rust/fuzz/corpus/operations -- -max_total_time=$(SECONDS) -max_len=1024
	mkdir -p target/fuzz/corpus-replay
	cargo fuzz run replay --sanitizer none --fuzz-dir rust/fuzz --target-dir target/fuzz \
	  target/fuzz/corpus-replay rust/fuzz/corpus/replay -- -max_total_time=$(SECONDS) -max_len=4096

mutants-python: $(MUTANTS)/.installed $(BUILT) ## the same for the scheduler, batches, recovery, keys; FILE=pyengine/engine/recovery.py: minutes
	$(MUTANTS)/bin/python tools/mutants.py $(FILE)

mutants: mutants-python ## changes kv-core in every way that cargo-mutants knows: which ones does no test notice? hours
	@command -v cargo-mutants > /dev/null || cargo install cargo-mutants --locked
	PROPTEST_MAX_SHRINK_ITERS=0 cargo mutants -p kv-core -j2 --timeout 60 --shuffle -o target/mutants

bench: $(BUILT) ## the block manager against vLLM's, SGLang's and nano-vllm's; installs those (6.5 GB)
	$(BIN)/python benches/peers/env.py
	$(PEERS)/bin/python -m benches.peers $(BENCH)

vllm-tests: $(BUILT) ## vLLM's own tests of its block management with ours; both engines, step by step; 8 minutes
	$(BIN)/python benches/peers/env.py
	$(BIN)/python tests/peers/vllm_own/run.py --python $(PEERS)/bin/python
	PYTHONPATH=target/vllm-own/site $(PEERS)/bin/python -m pytest -c tests/peers/pytest.ini --rootdir . tests/peers

conformance: $(ENGINE) ## vLLM's KVCacheManager in the conformance suite of block managers; installs it, as make bench does
	$(BIN)/python benches/peers/env.py
	cargo run --release -q -p kv-conformance -- $(PEERS)/bin/python tests/peers/vllm_conformance.py $(CONFORMANCE)

gpu-tests: $(GPU_TESTS)/.installed $(GPU_TESTS_TORCH_2_11)/.installed $(BUILT) ## the GPU path on a CUDA device that is not there: every backend on every family, compiled code; the newest torch, and 2.11
	$(GPU_TESTS)/bin/python $(FAKE_CUDA)
	$(GPU_TESTS_TORCH_2_11)/bin/python $(FAKE_CUDA)

gpu-planner: $(GPU_TESTS)/.installed-cuda $(BUILT) ## flashinfer's planner against our workspaces; brings nvcc (300 MB), needs g++
	$(GPU_TESTS)/bin/python -m pytest -m fake_cuda tests/fake_cuda/planner

gpu-first-run: $(DEV) $(BUILT) ## is the GPU path right, and how fast? nine minutes; DEVICE=cpu: tiny, to see that it runs
	$(BIN)/python -m benches.gpu.first_run --device $(DEVICE) --out $(OUT)

gpu-first-run-kit: $(GPU_TESTS)/.installed $(BUILT) ## what that takes along to a machine without a network: target/gpu-first-run; brings nvcc, needs g++
	$(GPU_TESTS)/bin/python -m benches.gpu.first_run.kit

bench-rust: ## how long the hot operations take in Rust, with criterion; BENCH=decode for some of them
	cargo bench -p kv-bench -- $(BENCH)

bench-worst: ## the slowest of each call in a million steps beside the median; BENCH='BLOCKS STEPS ROUNDS'
	cargo run --release -p kv-bench --bin worst -- $(BENCH)

guard: valgrind ## the hot operations take no more instructions than they did; needs valgrind
	$(PYTHON) benches/guard.py

guard-update: valgrind ## writes down how many they take now
	$(PYTHON) benches/guard.py --update

clean: ## remove what was built; .venv stays
	rm -rf target dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f pyengine/_kv*.so $(BUILT)
	find pyengine tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV) $(LIGHT) $(PEERS) $(CLIENTS) $(CLUSTER) $(GPU_TESTS) $(GPU_TESTS_TORCH_2_11) $(MUTANTS) $(FREE_THREADED) $(WHEELS) $(LINT_DEPLOY) $(AUDIT)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pyengine needs Python 3.11 or later, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); say make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(ENGINE): pyproject.toml uv.lock tools/install.py | $(VENV)/bin/python
	@command -v $(UV) > /dev/null || $(PIP) install uv
	$(BIN)/python $(INSTALL) engine
	@touch $@

$(SERVE): $(ENGINE)
	$(BIN)/python $(INSTALL) serve
	@touch $@

$(WITH_TORCH): $(ENGINE)
	$(BIN)/python $(INSTALL) torch
	@touch $@

$(DEV): $(SERVE)
	$(BIN)/python $(INSTALL) dev
	@touch $@

$(DOCS): $(DEV)
	$(BIN)/python $(INSTALL) docs
	@touch $@

$(LIGHT)/.installed: pyproject.toml uv.lock tools/install.py | $(VENV)/bin/python
	@command -v $(UV) > /dev/null || $(PIP) install uv
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python $(INSTALL) dev-light
	@touch $@

# $(call environment,FOLDER,GROUP,REQUIREMENTS): an environment with a group of pyproject.toml, and further
# requirements. The pip that comes with Python may be too old to find versions that go together.
define environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip --disable-pip-version-check -q --no-input install 'pip>=25'
	$(BIN)/python tools/requirements.py $(2) > $(1)/requirements.txt
	printf '%s\n' $(3) >> $(1)/requirements.txt
	$(1)/bin/python -m pip -q --no-input install -r $(1)/requirements.txt
endef

# $(call borrow,FOLDER): behind its own packages, those of .venv.
define borrow
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pyengine-venv.pth"
endef

$(CLIENTS)/.installed: pyproject.toml $(DEV)
	$(call environment,$(CLIENTS),clients)
	$(call borrow,$(CLIENTS))
	$(call environment,$(CLIENTS)/litellm,litellm) # it needs an older openai
	@touch $@

$(CLUSTER)/.installed: pyproject.toml $(DEV)
	$(call environment,$(CLUSTER),cluster)
	$(call borrow,$(CLUSTER))
	@touch $@

$(GPU_TESTS)/.installed: pyproject.toml $(DEV)
	$(call gpu_tests,$(GPU_TESTS),)
	@touch $@

$(GPU_TESTS_TORCH_2_11)/.installed: pyproject.toml Makefile $(DEV)
	$(call gpu_tests,$(GPU_TESTS_TORCH_2_11),$(TORCH_2_11))
	@touch $@

# $(call gpu_tests,FOLDER,REQUIREMENTS): attention libraries without what their kernels need: those are not built.
# Of flash-attn the sources.
define gpu_tests
	$(call environment,$(1),gpu-tests,$(2))
	$(call borrow,$(1))
	$(1)/bin/python -m pip -q --no-input install --no-deps flashinfer-python==$(FLASHINFER)
	$(1)/bin/python -m pip -q --no-input install --no-deps --target $(1)/newest flashinfer-python
	$(call flash_attn,$(1),oldest,flash-attn==$(FLASH_ATTN))
	$(call flash_attn,$(1),newest,flash-attn)
endef

# $(call flash_attn,ENVIRONMENT,FOLDER,REQUIREMENT): sources of flash-attn, of both versions.
define flash_attn
	mkdir -p $(1)/flash-attn/$(2)
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(1)/bin/python -m pip -q --no-input download --no-deps \
	  --no-build-isolation --no-binary :all: --dest $(1)/flash-attn/$(2) $(3)
	tar -xzf $(1)/flash-attn/$(2)/*.tar.gz --strip-components 1 -C $(1)/flash-attn/$(2)
endef

$(GPU_TESTS)/.installed-cuda: $(GPU_TESTS)/.installed
	$(BIN)/python tools/requirements.py gpu-planner > $(GPU_TESTS)/cuda.txt
	$(GPU_TESTS)/bin/python -m pip -q --no-input install --no-deps --target $(GPU_TESTS)/cuda -r $(GPU_TESTS)/cuda.txt
	@touch $@

$(MUTANTS)/.installed: pyproject.toml $(DEV)
	$(call environment,$(MUTANTS),mutants)
	$(call borrow,$(MUTANTS))
	@touch $@

$(WHEELS)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(WHEELS),wheels)
	@touch $@

$(LINT_DEPLOY)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(LINT_DEPLOY),lint-deploy)
	@touch $@

$(AUDIT)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(AUDIT),audit)
	@touch $@

# maturin asks pip for the libraries of every extra, and pip names each that it leaves out unless it is quiet.
$(BUILT): $(RUST_SOURCES) $(ENGINE)
	@command -v cargo > /dev/null || \
	  { echo "cargo was not found: the block manager is Rust; install the toolchain from https://rustup.rs"; exit 1; }
	$(BIN)/python -m maturin --version > /dev/null 2>&1 || $(PIP) install "$$($(BIN)/python tools/requirements.py build)"
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/python -m maturin develop --release
	@touch $@

# The same extension file as that of .venv: both are editable.
$(LIGHT)/.built: $(RUST_SOURCES) $(LIGHT)/.installed
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(LIGHT)) $(LIGHT)/bin/python -m maturin develop --release
	@touch $@

rust-tools:
	@cargo fmt --version > /dev/null 2>&1 || { echo "rustfmt is missing, asking rustup for it"; rustup component add rustfmt; }
	@cargo clippy --version > /dev/null 2>&1 || { echo "clippy is missing, asking rustup for it"; rustup component add clippy; }

valgrind:
	@command -v valgrind > /dev/null || sh tools/get_valgrind.sh

# The tests that need NumPy alone. An environment of its own: the extension there is no abi3 one.
THREADED_TESTS := tests/concurrency/test_arrays.py tests/concurrency/test_pins.py tests/concurrency/test_storm.py \
	tests/unit/kv_cache/test_step_buffers.py tests/unit/kv_cache/test_manager.py
free-threaded:
	@command -v $(PYTHON_T) > /dev/null || \
	  { echo "$(PYTHON_T) was not found: install a Python 3.14 without a global lock, or say PYTHON_T=..."; exit 1; }
	@$(PYTHON_T) -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED") or sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON_T) is $$($(PYTHON_T) -VV): this needs a 3.14 or later that was built without a global lock"; exit 1; }
	test -d $(FREE_THREADED) || $(PYTHON_T) -m venv $(FREE_THREADED)
	$(FREE_THREADED)/bin/python -m pip --disable-pip-version-check -q --no-input install numpy hypothesis pytest pytest-timeout 'maturin>=1.9.4,<2'
	PYO3_PYTHON=$(abspath $(FREE_THREADED)/bin/python) VIRTUAL_ENV=$(abspath $(FREE_THREADED)) \
	  $(FREE_THREADED)/bin/python -m maturin develop --release --skip-install --target-dir target/free-threaded

aarch64:
	@rustup target list --installed 2> /dev/null | grep -q aarch64-unknown-linux-gnu || rustup target add aarch64-unknown-linux-gnu
	@command -v qemu-aarch64-static > /dev/null && command -v aarch64-linux-gnu-gcc > /dev/null || sh tools/get_aarch64.sh
