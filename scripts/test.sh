#!/usr/bin/env bash
# Sets up .venv and runs lint, types and the tests that a change needs: the project's own that are not slow. With --all
# also the slow ones and those beside other libraries and programs. With --quick only those that start no process either,
# in less than two minutes. With other arguments, pytest runs once, with these.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
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
case "${1:-}" in
--quick) check quick "${pytest[@]}" tests --ignore=tests/interop -m "not processes and not slow" "${@:2}" ;;
--all)
    check tests "${pytest[@]}" tests --ignore=tests/interop "${@:2}"
    check interop "${pytest[@]}" tests/interop "${@:2}"
    ;;
"") check tests "${pytest[@]}" tests --ignore=tests/interop -m "not slow" ;;
*) check tests "${pytest[@]}" "$@" ;;
esac

if [ ${#failed[@]} -eq 0 ]; then
    echo "test: all passed"
else
    echo "test: failed: ${failed[*]}"
    exit 1
fi
