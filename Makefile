# Few targets; `make` lists them.

.DEFAULT_GOAL := help
SHELL := bash

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18

.PHONY: build
build: ## Build the release binary target/release/portolan
	cargo build --release --package portolan

.PHONY: demo
demo: ## Build a cluster of network namespaces and watch Portolan serve it (root)
	cargo run --release --package portolan -- demo

.PHONY: test
test: ## Everything that must pass: format, lints, unit, property, scenario, kernel and fault tests (root)
	./tests/run

.PHONY: test-cluster
test-cluster: ## The daemon against the real kube-apiserver and etcd (root, Go)
	./tests/cluster/run

.PHONY: test-vm
test-vm: ## The kernel tests inside a virtual machine, on Debian's 6.1 or another kernel (VM_KERNEL=6.12, VM_ARGS=--quick)
	./tests/vm/run $(VM_ARGS)

.PHONY: fuzz
fuzz: ## A short run of each fuzz target (FUZZ_SECONDS=15)
	./fuzz/run

.PHONY: bench
bench: ## Measure the budgets, with kube-proxy beside it where Go is present (root)
	./bench/run

.PHONY: deny
deny: ## Licences, bans and sources of the dependencies (needs cargo-deny)
	cargo deny --offline check licenses bans sources
