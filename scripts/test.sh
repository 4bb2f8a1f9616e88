#!/usr/bin/env bash
# Sets up .venv and runs lint, types and the whole test suite: first the project's own tests, then those beside other
# libraries and programs. With --quick only those of the project's own tests that start no process and are not slow, in
# less than two minutes. With other arguments, pytest runs once, with these.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset PYTHONDONTWRITEBYTECODE # hundreds of interpreters would compile the same files

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
pytest=(.venv/bin/python -m pytest -n 2 --dist loadgroup)
if [ "${1:-}" = --quick ]; then
    check quick "${pytest[@]}" tests --ignore=tests/interop -m "not processes and not slow" "${@:2}"
elif [ $# -gt 0 ]; then
    check tests "${pytest[@]}" "$@"
else
    check tests "${pytest[@]}" tests --ignore=tests/interop
    check interop "${pytest[@]}" tests/interop
fi

if [ ${#failed[@]} -eq 0 ]; then
    echo "test: all passed"
else
    echo "test: failed: ${failed[*]}"
    exit 1
fi
