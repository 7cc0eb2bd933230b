#!/usr/bin/env bash
# What must hold on a GPU, from a checkout that is not installed: pass counts, then the tables.
#   tools/gpu_check.sh                 every step below
#   tools/gpu_check.sh kernels fla     these steps only
# Steps:
#   kernels   tests of k3-kernels compiled, but for the model's, and the conformance battery
#   model     golden parity and k3-nano on each implementation, and what the other packages have
#             marked gpu
#   fla       fla's own test files through k3_kernels.compat.fla, where FLA_TESTS names their
#             folder (with ops/ and modules/, kept outside the repository)
#   tables    benchmarks/kernels*.py, with K3_GPU_TABLE=1; the one beside fla needs FLA_CORE, a
#             folder with fla-core and einops, which is not seen by the tests
# PYTHON names the interpreter, K3_GPU_WORKERS the test processes (12), K3_GPU_OUT the folder of
# logs and JSON (runs/gpu_check). Each step has a time limit; any that fails makes the exit code 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${K3_GPU_OUT:-runs/gpu_check}
mkdir -p "$out"
for package in core kernels train serve; do
    PYTHONPATH="$PWD/packages/k3-$package/src${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
steps=" ${*:-kernels model fla tables} "
summary=()
failed=0

# run NAME SECONDS COMMAND...: a step with its log and one line of the summary.
run() {
    local name=$1 limit=$2 log="$out/$1.log" start=$SECONDS code=0 verdict=ok
    shift 2
    printf '\n== %s: %s\n' "$name" "$*"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log" || code=${PIPESTATUS[0]}
    [ "$code" = 124 ] && verdict="stopped after $limit s"
    [ "$code" != 0 ] && [ "$code" != 124 ] && verdict="exit code $code"
    [ "$code" != 0 ] && failed=1
    local counts
    counts=$(grep -E '[0-9]+ (passed|failed|error|skipped)' "$log" | tail -1 | tr -d =)
    summary+=("$(printf '%-14s %5d s  %-20s %s' "$name" $((SECONDS - start)) "$verdict" "$counts")")
}

# tests NAME SECONDS WORKERS ARGUMENTS...: a pytest run, spread over processes where xdist is there.
tests() {
    local name=$1 limit=$2 workers=$3 spread=()
    shift 3
    "$python" -c "import xdist" 2>/dev/null && spread=(-n "$workers" --dist worksteal)
    run "$name" "$limit" "$python" -m pytest -q -p no:cacheprovider "${spread[@]}" "$@"
}

wants() { [[ "$steps" == *" $1 "* ]]; }

for step in $steps; do
    case $step in
        kernels | model | fla | tables) ;;
        *) echo "no step $step; the steps are kernels, model, fla and tables" && exit 2 ;;
    esac
done
"$python" - <<'CHECK' || exit 2
import torch, triton
assert torch.cuda.is_available(), "no CUDA device: .ci/run is the check of a machine without one"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
CHECK

workers=${K3_GPU_WORKERS:-12}
if wants kernels; then
    tests kernels 300 "$workers" -m "not external" --ignore packages/k3-kernels/tests/model \
        packages/k3-kernels packages/k3-core/tests/conformance
fi
if wants model; then
    mapfile -t files < <(grep -rlE 'mark\.gpu' --include='test_*.py' \
        packages/k3-core/tests packages/k3-train/tests packages/k3-serve/tests tests)
    tests model 300 8 -m gpu packages/k3-kernels/tests/model "${files[@]}"
fi
if wants fla && [ -n "${FLA_TESTS:-}" ]; then
    fla=(-c /dev/null --rootdir "$FLA_TESTS" -p k3_kernels.compat.fla.pytest_plugin -rs)
    tests fla 150 "$workers" "${fla[@]}" "$FLA_TESTS/ops/test_kda.py" "$FLA_TESTS/modules"
    tests fla-attnres 100 2 "${fla[@]}" "$FLA_TESTS/ops/test_attnres.py"
fi
if wants tables && [ "${K3_GPU_TABLE:-}" = 1 ]; then
    tables=(kernels kernels_ops)
    if [ -n "${FLA_CORE:-}" ]; then
        tables+=(kernels_fla)
        PYTHONPATH="$PYTHONPATH:$FLA_CORE"
    fi
    for table in "${tables[@]}"; do
        run "$table" 280 "$python" "benchmarks/$table.py" --device cuda --out "$out/$table.json"
    done
fi

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
