# `make demo` shows the main job; `make test` passes all tests. Both install what is missing.

CARGO ?= cargo

.PHONY: demo test drill verify fix

## Several processes want one lock: one at a time, tokens rising.
demo: toolchain
	$(CARGO) build --quiet --package leasehold-cli --no-default-features
	scripts/demo

## All tests, on real servers.
test: toolchain
	scripts/install-servers
	$(CARGO) test --workspace --all-features

## Kills Redis masters under load, ROUNDS times in each case, and counts double holds.
drill: toolchain
	scripts/install-servers
	$(CARGO) run --quiet --package leasehold-redis --example drill -- --rounds $(or $(ROUNDS),20)

## Changes nothing: format, lints, each feature alone, documentation; licences and bans where cargo-deny is installed.
verify: toolchain
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-features --all-targets --locked -- -D warnings
	@for features in "" file redis etcd zk zk-tls postgres; do \
	echo "leasehold with the features: $${features:-none}"; \
	$(CARGO) check --quiet --locked --package leasehold --no-default-features --features "$$features" || exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --all-features --no-deps --locked
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check; \
	else echo "cargo-deny is not installed: licences and bans were not checked"; fi

## Formats, and mends what the lints can mend.
fix: toolchain
	$(CARGO) fmt --all
	$(CARGO) clippy --workspace --all-features --all-targets --fix --allow-dirty --allow-staged

.PHONY: toolchain
toolchain:
	@command -v $(CARGO) >/dev/null || { \
	echo "Rust is missing: see https://rustup.rs (1.89 or newer)"; exit 1; }
	@scripts/install-build-tools
