# `make demo` shows the main job; `make test` passes all tests. Both install what is missing.

CARGO ?= cargo

# What `make test` runs, and how its servers are started: it installs programs.
SERVERS ?= programs
TESTS ?= --workspace
FEATURES ?= none file redis etcd zk zk-tls postgres

# Not of the workspace, so that what only they need is not in its lock file. What they share is built once.
OWN_WORKSPACES = bench examples/sqlite
SHARED = CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}"

.PHONY: demo test drill test-containers test-image images example fresh
.PHONY: verify lint check-features docs minimum-rust fix

## Several processes want one lock: one at a time, tokens rising.
demo: toolchain
	$(CARGO) build --quiet --package leasehold-cli --no-default-features
	scripts/demo

## All tests, on real servers.
test: toolchain
	scripts/install-servers
	LEASEHOLD_SERVERS=$(SERVERS) $(CARGO) test $(TESTS) --all-features

## The suite once more, on servers in containers. LEASEHOLD_REDIS_IMAGE and so on name other images.
test-containers: toolchain
	LEASEHOLD_SERVERS=containers $(CARGO) test --workspace --all-features --no-fail-fast \
	--test conformance --test containers

## The suite of one store on one image of conformance-tests/images.txt: STORE=redis IMAGE=redis:7.0
test-image: toolchain
	LEASEHOLD_SERVERS=containers LEASEHOLD_REQUIRE=$(STORE) \
	LEASEHOLD_$(shell echo $(STORE) | tr a-z A-Z)_IMAGE=$(IMAGE) \
	$(CARGO) test --package leasehold-$(patsubst zookeeper,zk,$(STORE)) \
	--features leasehold-conformance/containers --test conformance

## Stand-ins from Debian's packages for the images that the tests start; IMAGES=--all for all there can be.
images:
	scripts/build-images $(IMAGES)

## A backend of somebody else's, through the suite.
example: toolchain
	cd examples/sqlite && $(SHARED) $(CARGO) test --locked

## The two commands of the README on a machine that has only Debian, a C compiler and Rust.
fresh:
	scripts/fresh

## Kills Redis masters under load, ROUNDS times in each case, and counts double holds.
drill: toolchain
	scripts/install-servers
	$(CARGO) run --quiet --package leasehold-redis --example drill -- --rounds $(or $(ROUNDS),20)

## Changes nothing: format, lints, each feature alone, documentation; licences and bans where cargo-deny is installed.
verify: lint check-features docs
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check; \
	else echo "cargo-deny is not installed: licences and bans were not checked"; fi

lint: toolchain
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-features --all-targets --locked -- -D warnings
	@for own in $(OWN_WORKSPACES); do (cd $$own && echo "$$own:" && $(CARGO) fmt --check && \
	$(SHARED) $(CARGO) clippy --all-targets --locked -- -D warnings) || exit 1; done

## Each feature of the crate that users import, alone; FEATURES="redis" for one of them.
check-features: toolchain
	@for features in $(FEATURES); do \
	echo "leasehold with the features: $$features"; \
	$(CARGO) check --quiet --locked --package leasehold --no-default-features \
	--features "$$(echo $$features | sed s/^none$$//)" || exit 1; \
	done

docs: toolchain
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --all-features --no-deps --locked

## What the oldest Rust must still build: all but PostgreSQL, whose client needs 1.94.
minimum-rust: toolchain
	$(CARGO) check --locked --package leasehold-core --package leasehold-conformance
	$(CARGO) check --locked --package leasehold --no-default-features --features file,redis,etcd,zk

## Formats, and mends what the lints can mend.
fix: toolchain
	$(CARGO) fmt --all
	$(CARGO) clippy --workspace --all-features --all-targets --fix --allow-dirty --allow-staged

.PHONY: toolchain
toolchain:
	@command -v $(CARGO) >/dev/null || { \
	echo "Rust is missing: see https://rustup.rs (1.89 or newer)"; exit 1; }
	@scripts/install-build-tools
