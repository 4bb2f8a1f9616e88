#!/usr/bin/env bash
# Runs the core's tests with a given Python and release of torch, in a virtual environment of its own under .versions/:
#     bash scripts/test_versions.sh python3.13 2.15.0 [what pytest runs in place of all]
# All other packages are at the versions of constraints.txt where these exist for it. pip takes torch's own build from
# wherever it is set up to look, which for most releases is a build for CUDA, of some gigabytes; it runs on a CPU, too.
set -eu
[ $# -ge 2 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
python=$1 torch=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
home=.versions/python$version-torch$torch
if [ ! -e "$home/complete" ]; then
    "$python" -m venv "$home"
    grep -v '^torch==' constraints.txt >"$home/constraints.txt"
    "$home/bin/python" -m pip install --disable-pip-version-check -c "$home/constraints.txt" setuptools
    "$home/bin/python" -m pip install --disable-pip-version-check -c "$home/constraints.txt" --no-build-isolation \
        "torch==$torch" -e ".[test]"
    touch "$home/complete"
fi
[ $# -gt 0 ] || set -- tests/topologies tests/gossip --ignore=tests/gossip/lab -m "not slow"
"$home/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
exec "$home/bin/python" -m pytest -n 2 --dist loadgroup "$@"
