#!/usr/bin/env bash
# Sets up .venv and makes the tables and figures of README.md and docs/ again, in hours; arguments are passed on to
# scripts/evidence.py, whose --help explains them.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" lab,bench
exec .venv/bin/python scripts/evidence.py "$@"
