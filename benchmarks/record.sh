#!/usr/bin/env bash
# Everything that needs a GPU, one part after the other: bash benchmarks/record.sh FOLDER [PART ...]
# From the root of the checkout, with the package importable; PYTHON names the interpreter. What was printed, and the results
# files, lie in FOLDER; by test, in gpu-tests.txt. Parts: tests ready measure workers scaling host race gpus cli; default: all but
# gpus, which needs two GPUs. JOBS=10 spreads the tests over so many processes (with pytest-xdist) on one GPU.
set -euo pipefail
out=${1:?"usage: bash benchmarks/record.sh FOLDER [PART ...]"}
shift
python=${PYTHON:-python}
mkdir -p "$out"
failed=()

keep() {
    local name=$1 started=$SECONDS status=0
    shift
    echo "=== $name: $*"
    PYTHONUNBUFFERED=1 "$@" >"$out/$name.txt" 2>&1 || status=$?
    tail -n 3 "$out/$name.txt"
    echo "=== $name: exit code $status after $((SECONDS - started)) s"
    if [ "$status" -ne 0 ]; then failed+=("$name"); fi
}

suite() {
    local name=$1
    shift
    keep "$name" "$python" -m benchmarks run --out "$out/$name.json" "$@"
}

tests() {
    local spread=() jobs=${JOBS:-1}
    if [ "$jobs" -gt 1 ]; then spread=(-n "$jobs"); fi
    keep tests env OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" "$python" -m pytest tests -m gpu -v -p no:cacheprovider \
        --timeout=60 --deselect tests/gpu/test_gpu_memory.py "${spread[@]}"
    keep memory env OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" "$python" -m pytest tests/gpu/test_gpu_memory.py -v \
        -p no:cacheprovider --timeout=60 # alone: it fills the GPU
    sed -nE -e 's/^\[gw[0-9]+\] \[ *[0-9]+%\] ([A-Z]+) (tests.*)$/\2 \1/p' \
        -e 's/^(tests.*::.*) ([A-Z]+)( \(.*\))? +\[ *[0-9]+%\]$/\1 \2/p' "$out/tests.txt" "$out/memory.txt" |
        sed -E 's/ +([A-Z]+)$/ \1/' | LC_ALL=C sort >"$out/gpu-tests.txt"
}

for part in "${@:-tests ready measure workers scaling host race cli}"; do
    for name in $part; do
        case $name in
            tests) tests ;;
            ready) suite ready --rows loader ;;
            measure) suite measure --rows measure ;;
            workers) suite workers --rows workers ;;
            scaling) suite scaling --rows scaling --regimes transfer ;;
            host) suite host --rows host ;;
            race) keep race "$python" -m benchmarks race --out "$out/race.json" ;;
            gpus) suite gpus --rows two-gpus ;;
            cli) keep cli env PYTHON="$python" bash docs/cli/record.sh "$out/cli" ;;
            *)
                echo "no part $name; there are tests, ready, measure, workers, scaling, host, race, gpus, cli" >&2
                exit 2
                ;;
        esac
    done
done
if [ ${#failed[@]} -ne 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
