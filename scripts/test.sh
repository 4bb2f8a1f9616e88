#!/usr/bin/env bash
# Sets up .venv and runs lint, types and the whole test suite; arguments are passed on to pytest.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

failed=()
check() {
    local name=$1
    shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
}
check lint .venv/bin/ruff check .
check format .venv/bin/ruff format --check .
check types .venv/bin/mypy
check tests .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"

if [ ${#failed[@]} -eq 0 ]; then
    echo "test: all passed"
else
    echo "test: failed: ${failed[*]}"
    exit 1
fi
