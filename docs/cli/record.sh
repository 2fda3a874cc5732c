#!/usr/bin/env bash
# Runs every command of docs/cli.md and keeps what it printed: bash docs/cli/record.sh docs/cli/cpu
# From the root of the checkout, with the package importable; PYTHON names the interpreter.
set -euo pipefail
out=${1:?"usage: bash docs/cli/record.sh FOLDER"}
python=${PYTHON:-python}
example=examples/loader_for_cli.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export COLUMNS=120

keep() {
    local name=$1 status=0
    shift
    "$python" -m prefetchpipe "$@" >"$work/stdout" 2>"$work/stderr" || status=$?
    {
        echo "\$ prefetchpipe $*" | sed "s#$work/##g; s#$out/##g"
        cat "$work/stdout" "$work/stderr" | sed "s#$work/##g; s#$out/##g; s/[[:space:]]*\$//"
        if [ "$status" -ne 0 ]; then echo "(exit code $status)"; fi
    } >>"$out/$name.txt"
}

rm -f "$out"/*.txt
keep demo demo
keep doctor doctor
keep breakeven breakeven --chart "$out/breakeven.png"
sweep=(sweep "$example:make_loader" --step "$example:step" --batch-sizes 16,64,256 --depths 1,2,4 --workers 0,1)
keep sweep "${sweep[@]}" --chart "$out/sweep.png" --out "$work/before.json"
keep sweep-compare "${sweep[@]}" --no-chart --compare "$work/before.json"
keep trace trace "$example:make_loader" --step "$example:step" --batch-size 64 --workers 1 \
    --out "$work/trace.json" --chart "$out/trace.png"
keep bad-input breakeven --ops multiply,conv
keep bad-input sweep nowhere:make_loader
keep bad-input sweep "$example:make_loadr"
keep bad-input trace "$example"
echo '{"schema": 0, "command": "sweep", "prefetchpipe": "0.0.1"}' >"$work/old.json"
keep bad-input sweep "$example:make_loader" --compare "$work/old.json"
