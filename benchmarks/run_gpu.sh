#!/usr/bin/env bash
# Runs everything that needs a GPU, in one command of less than ten minutes and without a network: the build for this GPU,
# tests, memory checkers and benchmarks. OUTDIR gets a log for each step, results.jsonl (every row has the device, driver,
# clocks, versions and commit) and summary.md, which lists the steps that failed or were cut.
#
#   benchmarks/run_gpu.sh OUTDIR [--only build|tests|sanitizer|bench] [--pack] [--dry-run]
#
# --pack leaves two files in OUTDIR: summary.md, and records.tar.gz with all the others. --dry-run takes the same steps on
# the CPU at toy size, without the memory checkers. Environment variables:
#   PYTHON       the interpreter (python3)
#   RUN_SECONDS  the time for all steps (530)
#   COMMIT       the commit of the results, where the folder is not a git checkout
#   DATA_DIR     a folder with CIFAR-100: a study is trained there in the time that is left
#   GTest_ROOT   a folder with include/gtest and lib/libgtest.a, where GoogleTest is not installed (build/googletest)
#   CUDA_HOME    the CUDA toolkit (/usr/local/cuda where it exists)
# Exit code: 0 all done, 1 a step failed or was cut, 2 the command cannot run: an argument or a requirement is wrong.
set -uo pipefail

fail() { echo "run_gpu.sh: $1" >&2; exit 2; }

usage="usage: run_gpu.sh OUTDIR [--only build|tests|sanitizer|bench] [--pack] [--dry-run]"
out="" only="" dry="" pack=""
while [ $# -gt 0 ]; do
    case $1 in
        --only)
            only=${2:-}
            case $only in
                build | tests | sanitizer | bench) shift ;;
                *) fail "--only is '$only': choose from build, tests, sanitizer, bench" ;;
            esac
            ;;
        --dry-run) dry=1 ;;
        --pack) pack=1 ;;
        --help) echo "$usage"; exit 0 ;;
        -*) fail "unknown flag $1; $usage" ;;
        *) [ -z "$out" ] || fail "two folders, $out and $1; $usage"; out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || fail "$usage"
mkdir -p "$out/logs" 2> /dev/null || fail "cannot make the folder $out: name another"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
device=cuda total=${RUN_SECONDS:-530} unbuilt="" looked=""
[ -z "$dry" ] || device=cpu
# torch takes the folder above an nvcc on the path for the toolkit, which is wrong for a wrapper script.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda
needs=(--device $device)
[ -z "$only" ] || [ "$only" = build ] || needs+=(--no-build)
answer=$("$python" benchmarks/gpu_needs.py "${needs[@]}" 2> /dev/null) ||
    fail "${answer:-cannot ask $python what it has: set PYTHON to an interpreter with torch}"
read -r num_gpus architecture objects nvcc absent <<< "$answer"
rm -f "$out"/records.tar.gz "$out"/steps.jsonl "$out"/kernels.jsonl "$out"/training.jsonl "$out"/*.json "$out"/gpu.csv "$out"/logs/*
failed=0 planned=0

# note STEP STATUS SECONDS LIMIT [WHY]: one line of the record. No argument holds a quote or a backslash.
note() {
    printf '{"step": "%s", "status": "%s", "seconds": %d, "limit": %d, "note": "%s"}\n' "$1" "$2" "$3" "$4" "${5:-}" \
        >> "$out/steps.jsonl"
    echo "$1: $2, $3 s${5:+ ($5)}"
}

# step NAME SECONDS COMMAND...: run it for at most its share of the time, SECONDS of 530, and as much again where the steps
# before it left as much of theirs. So all limits together are the time for all, and what comes first waits for nothing.
step() {
    local name=$1 share=$(($2 * total / 530)) start=$SECONDS ending=TERM rc
    shift 2
    planned=$((planned + share))
    [ "$name" != pytest ] || ending=INT  # at which it says what has failed so far
    local limit=$((planned - SECONDS))
    [ "$limit" -le $((2 * share)) ] || limit=$((2 * share))
    if [ "$limit" -lt 2 ]; then
        note "$name" cut 0 0 "no time was left"
        failed=1
        return 1
    fi
    timeout --signal="$ending" --kill-after=5 "$limit" "$@" > "$out/logs/$name.log" 2>&1
    rc=$?
    case $rc in
        0) note "$name" ok $((SECONDS - start)) "$limit" ;;
        124 | 137) note "$name" timeout $((SECONDS - start)) "$limit" "see logs/$name.log"; failed=1 ;;
        *) note "$name" failed $((SECONDS - start)) "$limit" "exit code $rc, see logs/$name.log"; failed=1 ;;
    esac
    return $rc
}

# skip NAME WHY [SECONDS]: the share of a step that is not taken is left to those behind it.
skip() {
    planned=$((planned + ${3:-0} * total / 530))
    note "$1" skipped 0 0 "$2"
}

wants() { [ -z "$only" ] || [ "$only" = "$1" ]; }

build() {
    local cuda=0
    if [ -z "$dry" ]; then
        cuda=1
        export TORCH_CUDA_ARCH_LIST=$architecture
    fi
    step build 130 env DDPCORE_CUDA=$cuda MAX_JOBS="$(nproc)" "$python" setup.py -q build_ext --inplace ||
        unbuilt="the build failed: see logs/build.log"
}

# Whether the compiled kernels would run. If not, all that follows would test and time the reference implementations in
# torch. The result is kept, because an import takes seconds.
compiled() {
    if [ -z "$unbuilt$looked" ]; then
        looked=1
        "$python" -c 'import sys; from ddpcore.runtime import machine; sys.exit(sys.argv[1] not in machine.kernels())' $device \
            > "$out/logs/kernels.log" 2>&1 || unbuilt="no kernels for $device can be loaded: see logs/kernels.log"
    fi
    [ -z "$unbuilt" ]
}

# The C++ tests are linked with the objects that the build has made of each source, for this interpreter and no other:
# no kernel is compiled twice, and no other build in the same folder defines one again.
cpp_tests() {
    local source sources linked=() tests compiler root=${GTest_ROOT:-$PWD/build/googletest}
    sources=(csrc/cpu/*.cpp csrc/cuda/*.cu) tests=$(ls tests/cpp/test_cuda_*.cpp) compiler=$nvcc
    [ -z "$dry" ] || sources=(csrc/cpu/*.cpp) tests=tests/cpp/test_norms.cpp compiler="g++ -pthread"
    [ ! -d "$root" ] || compiler+=" -I $root/include -L $root/lib"
    for source in "${sources[@]}"; do
        linked+=("$objects/${source%.*}.o")
    done
    if ! g++ -x c++ -I "$root/include" -E - <<< '#include <gtest/gtest.h>' > /dev/null 2>&1; then
        skip cpp-tests "GoogleTest is not installed: set GTest_ROOT" 60
    elif ! ls "${linked[@]}" > /dev/null 2>&1; then
        skip cpp-tests "there are no objects in $objects: run the build first" 60
    elif [ -z "$dry" ] && [ "$nvcc" = - ]; then
        skip cpp-tests "nvcc is not installed" 60
    else
        mkdir -p build/cpp-objects && rm -f build/cpp-objects/* build/cpp-tests
        # shellcheck disable=SC2016
        step cpp-compile 30 xargs -P 4 -I{} sh -c "$compiler"' -std=c++20 -O1 -I csrc -c {} -o build/cpp-objects/$(basename {}).o' \
            < <(printf '%s\n' $tests) &&
            step cpp-link 10 $compiler build/cpp-objects/*.o "${linked[@]}" -lgtest -lgtest_main -o build/cpp-tests &&
            step cpp-tests 15 build/cpp-tests --gtest_brief=1
        # The kernels of noise sums for GPUs with slow doubles, on any GPU.
        [ ! -x build/cpp-tests ] || step cpp-tests-slow-doubles 5 env DDPCORE_SLOW_DOUBLES=1 build/cpp-tests --gtest_brief=1 \
            --gtest_filter='*Averages*.Noise*'
    fi
}

# The test files that import something that is not installed, themselves or by helpers that import each other.
left_out() {
    local pattern helper name
    pattern="^ *(import|from) ($(tr ' ' '|' <<< "$absent"))\\b"
    for _ in 1 2; do
        for helper in $(grep -lE "$pattern" tests/helpers/*.py); do
            name=$(basename "$helper" .py)
            pattern+="|^from helpers(\\.| import .*\\b)$name\\b"
        done
    done
    grep -rlE --include='test_*.py' "$pattern" tests
}

tests() {
    local chosen=(-m cuda --durations=10 --tb=short --continue-on-collection-errors) file
    [ -z "$dry" ] || chosen=(-m "not cuda" tests/ops/test_norms.py)
    [[ " $absent " = *" xdist "* ]] || chosen+=(-n 4 --dist loadfile)  # a file each at a time
    if [[ " $absent " = *" pytest "* ]]; then
        skip pytest "pytest is not installed" 100
    else
        [ -z "$absent" ] || for file in $(left_out); do chosen+=("--ignore=$file"); done
        step pytest 100 "$python" -m pytest -q -p no:cacheprovider "${chosen[@]}"
    fi
    cpp_tests
}

sanitizer() {
    local checker=compute-sanitizer filter
    if [ -n "$dry" ]; then
        skip sanitizer "there are no memory checkers in a dry run" 50
        return
    fi
    command -v $checker > /dev/null || checker=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
    if [ ! -x "$(command -v "$checker")" ]; then
        skip sanitizer "compute-sanitizer is not installed" 50
        return
    fi
    local option=--kernel-regex checkers=() # the name of it that older versions take
    [[ $("$checker" --help 2> /dev/null) != *--kernel-name* ]] || option=--kernel-name
    # Errors that are all in kernels of others do not count: those of torch also read memory that nobody wrote.
    # shellcheck disable=SC2016
    local ours_only='"${@:2}"; rc=$?
        if [ $rc = 86 ] && grep -qE "^=+ +at " "$1" && ! grep -qE "^=+ .*ddpcore(::|/_ops)" "$1"; then
            echo "no error is in a kernel of ddpcore"
            rc=0
        fi
        exit $rc'
    for tool in memcheck racecheck synccheck initcheck; do
        filter="$option kns=ddpcore"
        [ $tool != initcheck ] || filter=""  # which must see what other kernels write
        # shellcheck disable=SC2086
        step "sanitizer-$tool" 50 bash -c "$ours_only" bash "$out/logs/sanitizer-$tool.log" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$checker" --tool $tool --error-exitcode 86 \
            $filter "$python" benchmarks/small_cases.py --device cuda &
        checkers+=($!)
    done  # side by side: most of their time is the host's
    planned=$((planned + 50 * total / 530))
    for tool in "${checkers[@]}"; do wait "$tool" || failed=1; done
}

# kernel NAME SECONDS ARGUMENTS...: a benchmark of common.py, whose rows the summary sets beside copies.
kernel() {
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" "benchmarks/${name%%-*}.py" --device $device "$@" --json "$out/kernels.jsonl"
}

# Sizes: elements of float32. 25 MB, which an L2 cache holds, to 1 GB, and what the baseline's copies of 16 learners leave
# room for.
bench() {
    local all=(--dtype float32 bfloat16 --numel 6250000 25000000 250000000)
    local noise=(--numel 6250000 250000000 --repeats 7) noise16=(--numel 6250000 62500000 --repeats 7)
    local lists=(--models lenet5,resnet18,resnet50,vit-s,bert-base,bert-large --seconds 1) quick=() numel=250000000 message=()
    local strategies=(run.steps=200 data.batch_size=256) stats=(--every 20 --repeats 4 --batch-size 16)
    if [ -n "$dry" ]; then
        all=(--numel 5000 --repeats 3) noise=("${all[@]}") noise16=("${all[@]}") numel=5000
        lists=(--models lenet5 --repeats 3 --seconds 0.1) quick=(--repeats 1 --batch-size 4)
        message=(--max-mib 0.25 --seconds 0.01) strategies=(run.steps=5 data.batch_size=16)
        stats=(--every 2 --repeats 2 --batch-size 4)
    fi
    local name rule training=(--device $device --json "$out/training.jsonl")
    local ranks=(--world-size "$num_gpus")
    local optim=("$python" benchmarks/bench_optim.py --device $device "${lists[@]}")
    step bench_optim-float32 30 "${optim[@]}" --json "$out/optim-float32.json"
    for name in rules-sgd rules-adamw rules-lars rules-lamb mix mix_steps average norms; do
        case $name in rules-*) rule=(--rules "${name#rules-}") ;; *) rule=() ;; esac
        kernel bench_$name 9 "${rule[@]}" "${all[@]}"
    done
    kernel bench_noise 9 --learners 2 "${noise[@]}"
    kernel bench_noise-16 9 --learners 16 "${noise16[@]}"
    step bench_steps 14 "$python" benchmarks/bench_steps.py "${training[@]}" "${quick[@]}"
    step bench_shm 10 "$python" benchmarks/bench_shm.py "${training[@]}" --numel $numel --repeats 5
    step bench_training 8 "$python" benchmarks/bench_training.py "${training[@]}" "${quick[@]}"
    step strategies 10 "$python" -m ddpcore.bench run.device=$device --backend virtual model=lenet5 \
        --strategies ssgd,dpsgd,local_sgd "${strategies[@]}" --json "$out/strategies.json"
    step bench_statistics 8 "$python" benchmarks/bench_statistics.py "${training[@]}" "${stats[@]}"
    [ -n "$dry" ] || step bench_optim-bfloat16 14 "${optim[@]}" --dtype bfloat16 --json "$out/optim-bfloat16.json"
    if [ "$num_gpus" -lt 2 ]; then
        for name in buckets predict comm; do
            skip $name "ranks that share a GPU have no link to measure: bench_shm has their memory" 8
        done
    else
        step buckets 8 "$python" -m ddpcore.bench buckets "${ranks[@]}" run.device=$device model=lenet5 --rounds 2 --bucket-mb 0.1,one \
            --json "$out/buckets.json"
        step predict 8 "$python" -m ddpcore.bench predict "${ranks[@]}" run.device=$device model=lenet5 --rounds 2 \
            --json "$out/predict.json"
        step comm 8 "$python" -m ddpcore.bench comm "${ranks[@]}" --device $device "${message[@]}" --json "$out/comm.json"
    fi
    study
}

# As many rows as the time allows: a run that is cut goes on where it was, with --resume.
study() {
    local left=$((total - SECONDS)) rc
    if [ -z "${DATA_DIR:-}" ]; then
        skip study "DATA_DIR names no folder with CIFAR-100"
    elif [ -n "$dry" ] || [ "$left" -lt 20 ]; then
        skip study "$left s are left"
    else
        timeout --signal=INT --kill-after=5 $((left - 10)) "$python" -m ddpcore.experiments run large-batch-cifar100 \
            --scale full --seeds 1 --set run.device=$device --data-dir "$DATA_DIR" --out "$out/study" > "$out/logs/study.log" 2>&1
        rc=$?
        note study "$([ $rc = 0 ] && echo ok || echo cut)" $((left - total + SECONDS)) $((left - 10)) "see study/results.jsonl"
    fi
}

sampler=""
if [ -z "$dry" ] && command -v nvidia-smi > /dev/null; then
    query=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,utilization.gpu
    nvidia-smi --query-gpu=$query --format=csv,nounits --loop=1 > "$out/gpu.csv" 2> /dev/null &
    sampler=$!
    trap '[ -z "$sampler" ] || kill "$sampler" 2> /dev/null' EXIT
fi
[ -n "${COMMIT:-}" ] || git rev-parse HEAD > /dev/null 2>&1 || skip commit "this folder is no git checkout: set COMMIT"
[ -z "$absent" ] || skip needs "not installed: $absent; what needs it is left out or slower"
declare -A shares=([build]=130 [tests]=160 [sanitizer]=50 [bench]=0)  # all that comes before another stage
for stage in build tests sanitizer bench; do
    if ! wants $stage; then
        planned=$((planned + shares[$stage] * total / 530))
    elif [ $stage = build ] || compiled; then
        $stage
    else
        skip $stage "$unbuilt" "${shares[$stage]}"
        failed=1
    fi
done
[ -z "$sampler" ] || { kill "$sampler" 2> /dev/null; wait "$sampler" 2> /dev/null; sampler=""; }
if ! timeout 60 "$python" benchmarks/summarize.py "$out" --device $device --commit "${COMMIT:-}"; then
    echo "run_gpu.sh: no summary was made; the records are in $out" >&2
    failed=1
fi
if [ -n "$pack" ]; then
    (cd "$out" && tar -czf ../records.$$ --exclude=./summary.md . && find . -mindepth 1 -maxdepth 1 ! -name summary.md -exec rm -r {} + &&
        mv ../records.$$ records.tar.gz) || failed=1
fi
echo "$out/summary.md"
exit $failed
