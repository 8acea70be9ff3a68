#!/usr/bin/env bash
# The entry point: sets up if needed, then trains, tests or runs any other command. See `./run.sh --help`.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

usage() {
    cat <<'TEXT'
Train image classifiers with TensorFlow and Horovod: one process (rank) per GPU or core.

  ./run.sh                                             set up if needed, then train with the defaults
  ./run.sh setup --gpu                                 set up only: in .venv, with TensorFlow for GPUs; --cpu: without
  ./run.sh test                                        run linters, type checks and all but slow tests
  ./run.sh -np 2 train --model resnet20 --epochs 2     train on two ranks; ./run.sh train --help lists options
  ./run.sh -np 2 evaluate --run-dir runs/first         evaluate a run on the whole test set
  ./run.sh predict runs/first photo.png                classify images with the net of a run
  ./run.sh report runs/first                           write a page about a run, also while it goes on
  ./run.sh setup --hostfile my-hosts                   set up every host of a file with lines `HOST slots=N`
  ./run.sh --hostfile my-hosts train                   train on all of them; ./run.sh doctor --hostfile my-hosts checks them
  ./run.sh -np 2 python examples/fit.py                run a program of your own on every rank

./run.sh --help-all lists all commands and the launcher's options, docs/configuration.md every option.
TEXT
}

usage_of_all() {
    cat <<'TEXT'
Train image classifiers with TensorFlow and Horovod: one process (rank) per GPU or core.

  ./run.sh                                 set up if needed, then train with the defaults
  ./run.sh setup [--gpu]                   set up only: in .venv, with TensorFlow for the CPU, or for GPUs
                                           later set-ups keep this; --cpu undoes it; --test adds the tests' tools
  ./run.sh setup --hostfile FILE | -H HOSTS   set up every host: they get this checkout and its environment
  ./run.sh wheel --to FOLDER [--gpu]       set up if needed, and write wheels that pip installs in other environments
  ./run.sh test [PYTEST OPTIONS]           run linters, type checks and all but slow tests; with options: pytest
  ./run.sh test --all [PYTEST OPTIONS]     run slow tests too, such as those of clusters; --slow: these alone
  ./run.sh [-np N] [-H HOSTS | --hostfile FILE] [LAUNCHER OPTIONS] COMMAND [OPTIONS]
  ./run.sh predict RUN_DIR IMAGE|FOLDER... [--json]    classify images with the net of a run
  ./run.sh export RUN_DIR --to FOLDER      write the net of a run as files that TensorFlow loads without this program
  ./run.sh report RUN_DIR...               write a page about runs: curves, lost time, events, mistakes
  ./run.sh doctor [-H HOSTS | --hostfile FILE]             check all hosts at once for the usual faults

COMMAND is train, evaluate, or benchmark step|allreduce. `./run.sh COMMAND --help` and
docs/configuration.md list its options.
`python PROGRAM.py [ARGUMENTS]` as the command runs a program of your own on every rank, in this environment.
  -np N              number of ranks; default: one per GPU (after setup --gpu), else one per core, at most 8; with hosts
                     all their slots, in a Slurm job its tasks
  -H a:4,b:4         hosts to run them on, as HOST:SLOTS; default: this machine, in a Slurm job its nodes
  --hostfile FILE    the same, from a file with lines `HOST slots=N`; see hostfiles/
  --allreduce ring   NCCL's ring on GPUs, MPI's within a host; auto (default): they choose. Between CPU hosts: a ring
  --max-restarts N   if the job fails, start again from the newest checkpoint, up to N times
  --validation-ranks K   K of the ranks evaluate while the others train; see docs/validation.md
  --elastic MIN:MAX  train on MIN to MAX ranks: continue without lost ranks and hosts, and with added ones. With it:
                     --elastic-timeout SECONDS (600) and --cool-down FIRST:LONGEST (10:300 seconds); see
                     docs/reliability.md
  --dry-run          print the command that starts the ranks, but do not run it
  PYTHON=python3.12 ./run.sh setup         the Python to set up with (3.10 to 3.13; default: python3)
TEXT
}

# As an environment's `activate` does: it names the library of another Python.
unset PYTHONHOME

# The Python for set-up: the user's choice, else the environment's, else python3.
python=${PYTHON:-$here/.venv/bin/python}
# An environment's Python for another processor, or for newer libraries, does not run here.
[[ -n ${PYTHON:-} ]] || "$python" -I -S -c '' 2>/dev/null || python=python3
if ! command -v -- "$python" >/dev/null; then
    echo "hvd_cifar: no such program: $python; install Python 3.10 to 3.13, or name one: PYTHON=python3.12 ./run.sh" >&2
    exit 2
fi
# -I: no module of the current folder or of PYTHONPATH takes the place of Python's own (docs/security.md).
install=("$python" -I "$here/hvd_cifar/launch/install/__main__.py")

run_tests() {
    "${install[@]}" needed --test
    cd -- "$here"
    local bin=$here/.venv/bin marks="not slow"
    case ${1:-} in
        --all) marks="slow or not slow" && shift ;;
        --slow) marks=slow && shift ;;
    esac
    if (($# == 0)) && [[ $marks != slow ]]; then
        "$bin/ruff" check .
        "$bin/mypy"
        "$bin/lint-imports"
        "$bin/shellcheck" run.sh .ci/run deploy/*.sh deploy/*.sbatch
        # Some hundred ranks start. With PYTHONDONTWRITEBYTECODE set, each would compile the package.
        "$bin/python" -m compileall -q hvd_cifar benchmarks tests
    fi
    if (($# == 0)); then
        # Two files at a time, short ones at the end: many tests wait for hosts and time-outs. The longest are listed.
        set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5
    fi
    # The summary ends with the reasons of skipped tests: what this machine lacks.
    exec "$bin/python" -m pytest -rfEs -m "$marks" "$@"
}

case ${1:-} in
    -h | --help | help) usage ;;
    --help-all) usage_of_all ;;
    setup | wheel) exec "${install[@]}" "$@" ;;
    test) run_tests "${@:2}" ;;
    *) exec "${install[@]}" run "$@" ;;
esac
