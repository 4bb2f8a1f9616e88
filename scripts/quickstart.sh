#!/usr/bin/env bash
# Sets up .venv and runs the main job; arguments are passed on to scripts/train.py.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" lab

.venv/bin/python scripts/train.py "$@"
status=$?
if [ $status -eq 0 ]; then
    echo "quickstart: done"
else
    echo "quickstart: failed with exit status $status"
fi
exit $status
