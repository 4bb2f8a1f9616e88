# Sourced by quickstart.sh and test.sh: makes .venv next to the repository's files and installs into it what
# setup.cfg asks for, at the versions that constraints.txt pins. Does nothing when that has been done already.

fail() {
    echo "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
        if [ -n "$candidate" ] &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
                >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME

wanted=$(cat setup.cfg setup.py pyproject.toml constraints.txt scripts/environment.sh gossip/compression/*.c | cksum; pwd)
if [ ! -x .venv/bin/python ] || [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    python=$(find_python) ||
        fail "Python 3.11 or 3.12 with the venv module was not found; install it, or name it: PYTHON=/path/to/python bash $0"
    echo "Setting up .venv with $("$python" --version) (the first time takes a few minutes)"
    .venv/bin/python -c '' 2>/dev/null || rm -rf .venv
    rm -f gossip/compression/*.so
    [ -d .venv ] || "$python" -m venv .venv || fail "could not make .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
            -c constraints.txt -e '.[dev]' ||
        fail "installing into .venv failed: see pip's message above"
    compgen -G "gossip/compression/lattice_passes.*.so" >/dev/null ||
        echo "There is no C compiler that works here: int8 and int4 run by torch, a few times as slow"
    echo "$wanted" >.venv/installed
fi
