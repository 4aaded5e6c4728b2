#!/usr/bin/env bash
# Does a wheel that was built against one torch work in another?
#
#   tests/wheel_across_torch.sh PYTHON VERSION...      for example: .venv/bin/python 2.11.0 2.14.1
#
# Builds a wheel with PYTHON's torch, then for each VERSION makes an environment with that torch and the wheel and
# compares every variant on the CPU with the portable path. Not part of CI: a torch is a large download. Run by hand when
# the torch layer changes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel --disable-pip-version-check -qq --no-build-isolation --no-deps -w "$work" .
wheel=$(echo "$work"/*.whl)
echo "built $(basename "$wheel") against torch $("$python" -c 'import torch; print(torch.__version__)')"

for version in "$@"; do
    echo "torch $version: making an environment"
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --disable-pip-version-check -qq "torch==$version" numpy
    "$work/$version/bin/pip" install --disable-pip-version-check -qq --no-deps "$wheel"
    (cd "$work" && "$work/$version/bin/python" -m strata_ops info | sed -n 1,2p && "$work/$version/bin/python" -m strata_ops parity)
    rm -rf "${work:?}/$version"
done
