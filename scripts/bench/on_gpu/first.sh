#!/usr/bin/env bash
# Measure a GPU for the first time, on a machine without a network and without Engine installed:
#
#     first.sh wheels        where there is a network: download what such a machine lacks to $WHEELS
#     first.sh A [--dry]     is it right?    9.5 minutes
#     first.sh B [--dry]     how fast?       9.5 minutes
#     first.sh C [--dry]     why?            8 minutes
#     first.sh D [--dry]     is each family right? 9.5 minutes with 16 processor cores
#     first.sh E [--dry]     how fast are experts, and is each kind of request right? 9.5 minutes
#
# $PYTHON (python3) must have torch for CUDA, Triton, pytest and transformers. $WHEELS (.wheels in the repository) may
# hold further packages. Each call writes three files to $OUT (the current directory): A.json, A.log and A.txt. --dry
# runs a toy model on the CPU. Further options go to gpu.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
wheels=${WHEELS:-$root/.wheels}
out=${OUT:-$PWD}
python=${PYTHON:-python3}
packages=(gguf httptools llguidance msgspec pyzmq setproctitle starlette transformers==5.24.0 uvicorn)
# For call E.
packages+=(annotated-types anyio cffi distro httpcore2 httpx2 idna jiter openai pycparser pydantic pydantic-core sniffio)
packages+=(soundfile truststore typing-extensions typing-inspection)
minutes=9.3 options=()
case ${1:-} in
    wheels)
        platforms=()
        for glibc in 2_28 2_27 2_26 2_24 2_17 2_5; do
            platforms+=(--platform "manylinux_${glibc}_x86_64")
        done
        exec "$python" -m pip download --no-deps --only-binary=:all: --dest "$wheels" \
            --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
            "${platforms[@]}" --platform manylinux2014_x86_64 "${packages[@]}"
        ;;
    A | B | D | E) ;;
    C) minutes=7.8 ;;
    *)
        sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
call=$1
shift
if [[ ${1:-} == --dry ]]; then
    options=(--device cpu --tiny)
    shift
fi
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --upgrade --target "$site" "$wheels"/*.whl
fi
# The repository is the package.
ln -s "$root" "$site/engine"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
"$python" "$root/scripts/bench/gpu.py" --call "$call" --minutes "$minutes" --json "$out/$call.json" \
    "${options[@]}" "$@" | tee "$out/$call.txt"
