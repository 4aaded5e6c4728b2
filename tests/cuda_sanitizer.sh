#!/bin/sh
# Every GPU kernel under compute-sanitizer: one line a tool, exit status 1 where one finds something or cannot run.
#
#   tests/cuda_sanitizer.sh [tool...]        default: memcheck racecheck synccheck initcheck
#
# PYTHON names an interpreter that finds torch and strata_ops (default: python3); SANITIZER the program, where it is not
# on the PATH. Run on an idle GPU; minutes.
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-compute-sanitizer}
command -v "$sanitizer" >/dev/null || { echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"; exit 1; }
[ $# -gt 0 ] || set -- memcheck racecheck synccheck initcheck

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
status=0
for tool in "$@"; do
    case $tool in
        # Each tensor its own allocation, so that a byte beyond one is seen.
        memcheck) options="--leak-check no" caching=1 ;;
        racecheck) options="--racecheck-report all" caching= ;;
        *) options= caching= ;;
    esac
    # shellcheck disable=SC2086
    if PYTHONPATH=".:tests" PYTORCH_NO_CUDA_MEMORY_CACHING=$caching "$sanitizer" --tool "$tool" $options \
        --error-exitcode 9 "$python" tests/sanitized_reads.py >"$log" 2>&1 && grep -q ' reads on ' "$log"; then
        echo "$tool: clean, $(grep ' reads on ' "$log")"
    else
        echo "$tool: NOT CLEAN; $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY\|Error' "$log" | tail -1)"
        grep -v '^$' "$log" | head -40 | sed 's/^/    /'
        status=1
    fi
done
exit $status
