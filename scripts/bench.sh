#!/usr/bin/env bash
# Sets up .venv and measures the tables of the benchmark, as root on shaped links; arguments are passed on to each run.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" lab,bench

folder=outputs/bench_$(date +%Y-%m-%d_%H-%M-%S)
failed=()
table() {
    local name=$1
    shift
    echo "== $name"
    .venv/bin/python scripts/bench.py hydra.run.dir="$folder/$name" "$@" || failed+=("$name")
}
table lab bench.network=lab "$@"
table lab_buckets bench.network=lab bench/methods=buckets bench.repetitions=2 bench.steps=8 "$@"
table buckets bench/methods=buckets bench.repetitions=2 bench.steps=15 "$@"
table stragglers bench.straggler=exponential bench/methods=stragglers bench.steps=40 "$@"
table loopback bench.steps=25 "$@"

if [ ${#failed[@]} -eq 0 ]; then
    echo "bench: done: $folder"
else
    echo "bench: failed: ${failed[*]}"
    exit 1
fi
