#!/usr/bin/env bash
# Sets up .venv and builds the documentation's site in docs/_build/html; a warning is an error.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
.venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
echo "docs: docs/_build/html/index.html"
