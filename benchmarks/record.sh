#!/usr/bin/env bash
# Everything that needs a GPU, one part after the other: bash benchmarks/record.sh FOLDER [PART ...]
# From the root of the checkout, with the package importable; PYTHON names the interpreter. What was printed, and the results
# files, lie in FOLDER. Parts: tests ready workers scaling host race gpus cli; default: all but gpus, which needs two GPUs.
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

for part in "${@:-tests ready workers scaling host race cli}"; do
    for name in $part; do
        case $name in
            tests) keep tests "$python" -m pytest tests/gpu tests/cases tests/integrations -m gpu -v -p no:cacheprovider ;;
            ready) suite ready --rows loader measure ;;
            workers) suite workers --rows workers ;;
            scaling) suite scaling --rows scaling --regimes transfer ;;
            host) suite host --rows host ;;
            race) keep race "$python" -m benchmarks race --out "$out/race.json" ;;
            gpus) suite gpus --rows two-gpus ;;
            cli) keep cli env PYTHON="$python" bash docs/cli/record.sh "$out/cli" ;;
            *)
                echo "no part $name; there are tests, ready, workers, scaling, host, race, gpus, cli" >&2
                exit 2
                ;;
        esac
    done
done
if [ ${#failed[@]} -ne 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
