#!/usr/bin/env bash
# The two calls of a GPU that is lent for a quarter of an hour without a network (docs/gpu.md).
#
#   bash bench/gpu/lent.sh carry      here: compile the kernels into .gpu/triton.tgz
#   bash bench/gpu/lent.sh 1          there: kernels' tests, correctness, and the main figures
#   bash bench/gpu/lent.sh 2          there: what failed, and the rest
#
# .gpu/ travels with the tree. Between the calls, first.json and triton.tgz of the first one's results
# replace those in .gpu/. OUT: folder of results, a few files. CSD_COMMIT: the commit where there is
# no .git. PYTHON: the interpreter.
set -o pipefail
PYTHON=${PYTHON:-python3} OUT=${OUT:-build/lent} CARRIED=.gpu
# entries of Triton's cache have its path, so it is the same everywhere
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/csd-triton} XDG_CACHE_HOME=${XDG_CACHE_HOME:-/tmp/csd-cache}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
CHIP=sm_90
TESTS="tests/hardware/gpu/test_on_gpu.py $(echo tests/unit/kernels/{attention/test_{tree_attention,attention_plan,merge_partials,commit_kv},draft/test_draft_tree_triton,layers/test_elementwise,table/test_{graph_insert_triton,observe},verify/test_{verify,advance_slots,snapshot}}.py)"

unpack() {
    if [ -f $CARRIED/triton.tgz ]; then tar xzPf $CARRIED/triton.tgz; fi
}

pack() {
    find "$TRITON_CACHE_DIR" \( -name '*.json' -o -name '*.cubin' -o -name '*.so' \) | tar czPf "$1" -T -
}

describe() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
    nproc
    df -h /dev/shm /tmp | tail -n 2
}

shown() {
    grep -h Error "$1" | sort | uniq -c | sort -rn | head -n 15
    tail -n 40 "$1"
    echo "exit code $2, $SECONDS s"
}

case "$1" in
carry)
    mkdir -p $CARRIED
    "$PYTHON" -m bench.gpu.sections.compile $CHIP && pack $CARRIED/triton.tgz
    ;;
1)
    mkdir -p "$OUT"
    unpack
    describe >"$OUT/first.log" 2>&1
    # beside correctness alone: they end before the first section that measures time
    CSD_TEST_DEVICE=cuda TRITON_INTERPRET=0 OMP_NUM_THREADS=1 timeout -k 5 90 "$PYTHON" -m pytest -q -n 6 -m "compiled and not slow" \
        --session-timeout=75 --tb=short --junitxml="$OUT/tests.xml" $TESTS >"$OUT/tests.log" 2>&1 &
    tests=$!
    timeout -k 5 330 "$PYTHON" -m bench.gpu --call 1 --out "$(mktemp -d)" --into "$OUT/first.json" \
        >>"$OUT/first.log" 2>&1
    code=$?
    wait $tests
    tests=$?
    pack "$OUT/triton.tgz"
    tail -n 4 "$OUT/tests.log"
    shown "$OUT/first.log" $code
    exit $((code ? code : tests))
    ;;
2)
    mkdir -p "$OUT"
    unpack
    describe >"$OUT/second.log" 2>&1
    earlier=()
    if [ -f $CARRIED/first.json ]; then earlier=(--kept $CARRIED/first.json); fi
    timeout -k 5 245 "$PYTHON" -m bench.gpu --call 2 "${earlier[@]}" --out "$(mktemp -d)" \
        --into "$OUT/second.json" >>"$OUT/second.log" 2>&1
    code=$?
    shown "$OUT/second.log" $code
    exit $code
    ;;
*)
    echo "usage: bash bench/gpu/lent.sh carry | 1 | 2" >&2
    exit 2
    ;;
esac
