# Sourced with the name of an extra by the scripts that need it: makes .venv next to the repository's files and installs
# into it what setup.cfg asks for with this extra ("lab", or "dev" for all of them), at the versions that
# constraints.txt pins. Does nothing when that has been done already.

fail() {
    echo "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Tells of large downloads, and when pip begins to unpack. Files are compiled when they are first imported: to compile all
# of them takes longer than to unpack them.
install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off -c constraints.txt "$@" |
        sed -un -E 's/^ *(Downloading \S+ \([0-9.]+ [MG]B\))$/    \1/p; s/^Installing collected packages.*/    Unpacking/p'
    return "${PIPESTATUS[0]}"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME

extra=$1
wanted="$(cat setup.cfg setup.py pyproject.toml constraints.txt scripts/environment.sh gossip/compression/*.c | cksum) $PWD"
installed=$(cat .venv/installed 2>/dev/null)
if [ ! -x .venv/bin/python ] || [[ $installed != "dev $wanted" && $installed != "$extra $wanted" ]]; then
    python=$(find_python) || fail "${PYTHON:-Python 3.11 to 3.14 with the venv module} was not found, or is another \
version than 3.11 to 3.14; install one, or name it: PYTHON=/path/to/python bash $0"
    .venv/bin/python -c '' 2>/dev/null || rm -rf .venv
    version=$("$python" --version)
    [ ! -d .venv ] || [ -z "${PYTHON:-}" ] || [ "$(.venv/bin/python --version)" = "$version" ] ||
        fail "PYTHON names $version, but .venv has $(.venv/bin/python --version): remove .venv, then run this again"
    echo "Setting up .venv with $version (the first time takes a few minutes)"
    rm -f gossip/compression/*.so
    [ -d .venv ] || "$python" -m venv .venv || fail "could not make .venv"
    echo "  Installing what builds this package"
    install setuptools && echo "  Installing this package with its extra '$extra'" &&
        install --no-build-isolation -e ".[$extra]" || fail "installing into .venv failed: see pip's message above"
    compgen -G "gossip/compression/lattice_passes.*.so" >/dev/null ||
        echo "There is no C compiler that works here: int8 and int4 run by torch, a few times as slow"
    .venv/bin/python -m gossip_training || exit 1
    echo "$extra $wanted" >.venv/installed
fi
