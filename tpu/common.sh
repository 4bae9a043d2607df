# Sourced by the scripts here and by scripts/gpu: arguments, checks, a dry run. Works with bash 3.2, which macOS has.
# shellcheck shell=bash disable=SC2034  # the scripts that source this read the variables
set -euo pipefail

NAME="" ZONE="" PROJECT="" TYPE="" VERSION="" CONFIG="" WORKDIR="" TOKENIZER="" SHARDS="" LOGS="" IMAGE="" NAMESPACE="default"
ENVIRONMENT="" SPOT="" QUEUED="" RECOVER="" DRY_RUN="" HOSTS="" DEVICES="" TOPOLOGY="" ACCELERATOR="" FLAGS="" SLICES="1"
OVERRIDES=() REST=()
QUOTE="'\\''" # a single quote among single quotes
POLL_S="${LMJAX_POLL_S:-30}" # between looks at a state
TRIES="${LMJAX_TRIES:-1}"    # looks that may fail in a row; more where nobody is there to try again
PATIENT_TRIES=10

die() { # MESSAGE: the user's mistake, in one line
  echo "$(basename "$0"): $*" >&2
  exit 2
}

fail() { # MESSAGE: what went wrong through nobody's mistake
  echo "$(basename "$0"): $*" >&2
  exit 1
}

case "$0" in /*) SELF="$0" ;; *) SELF="$PWD/$0" ;; esac # this is sourced before a script goes elsewhere

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$SELF"; }

parse() { # reads all arguments; every script takes those of all, so that `recover` passes its own on
  while [ $# -gt 0 ]; do
    case "$1" in
      -h | --help) usage && exit 0 ;;
      --dry-run) DRY_RUN=yes ;;
      --spot) SPOT=yes ;;
      --queued) QUEUED=yes ;;
      --recover) RECOVER=yes ;;
      --config.*=*) OVERRIDES+=("$1") ;;
      --name | --zone | --project | --type | --version | --config | --workdir | --tokenizer | --shards | --logs | --image | \
        --namespace | --environment | --hosts | --devices | --topology | --accelerator | --flags | --slices)
        [ $# -ge 2 ] || die "$1 needs a value"
        printf -v "$(echo "${1#--}" | tr '[:lower:]' '[:upper:]')" '%s' "$2"
        shift
        ;;
      --)
        shift
        REST=("$@")
        return
        ;;
      *) die "unknown argument $1; --help lists them" ;;
    esac
    shift
  done
}

need() { # FLAG WHAT: that argument must be given
  local variable
  variable="$(echo "$1" | tr '[:lower:]' '[:upper:]')"
  [ -n "${!variable}" ] || die "--$1 is missing: $2"
}

need_pod() {
  need name "the TPU's name"
  need zone "where it is, such as us-east5-a"
}

need_run() { # what a run needs, as far as it can be seen from here
  need config "the run, such as configs/pretrain/llama_1b.py"
  need workdir "the run's folder, in a bucket (gs://…) or on a file system that all hosts see"
  need tokenizer "a folder made by \`lmjax tokenizer\`, beside the workdir"
  need shards "folders made by \`lmjax tokenize\`, with commas between them"
  [ -f "$CONFIG" ] || die "--config: there is no file $CONFIG"
  case "$CONFIG" in /*) die "--config must lie in this checkout, which is copied to the hosts: $CONFIG" ;; esac
  local path shards
  IFS=, read -ra shards <<<"$SHARDS" # a folder's name may have spaces
  for path in "$WORKDIR" "$TOKENIZER" "${shards[@]}"; do
    case "$path" in
      gs://?* | /*) ;;
      *) die "$path must be seen by all hosts: gs://… or an absolute path" ;;
    esac
  done
}

train_words() { # the arguments of \`lmjax\` for the run, into WORDS
  WORDS=(train --config "$CONFIG" --workdir "$WORKDIR" --distributed "--config.tokenizer=$TOKENIZER")
  WORDS+=("--config.data.shards=$SHARDS")
  case "$WORKDIR" in gs://*) WORDS+=("--config.monitor.tensorboard=false") ;; esac # event files need a disk
  case "$SHARDS" in *gs://*) WORDS+=("--config.data.cache_dir=/tmp/lmjax-shards") ;; esac
  WORDS+=(${OVERRIDES[@]+"${OVERRIDES[@]}"})
}

xla_flags() { # PLATFORM: XLA's flags for it, of which those in --flags win
  python3 -I lmjax/xla_flags.py "$1" "--given=$FLAGS"
}

quoted() { # WORDS…: as they would be typed
  local word line=""
  for word in "$@"; do
    case "$word" in
      "" | *[!A-Za-z0-9_./:=,@%+-]*) word="'${word//\'/$QUOTE}'" ;;
    esac
    line="$line $word"
  done
  echo "${line# }"
}

run() { # COMMAND…: tells and does; a dry run only tells
  echo "+ $(quoted "$@")"
  [ -n "$DRY_RUN" ] || "$@"
}

place() { # the arguments that say where a TPU is, into PLACE
  PLACE=(--zone "$ZONE")
  [ -z "$PROJECT" ] || PLACE+=(--project "$PROJECT")
}

check_gcloud() { # gcloud is there, and knows who and what; a dry run asks nothing of it
  [ -z "$DRY_RUN" ] || return 0
  command -v gcloud >/dev/null || die "gcloud is not installed: see cloud.google.com/sdk/docs/install"
  [ -n "$(gcloud auth list --filter=status:ACTIVE --format='value(account)' 2>/dev/null)" ] ||
    die "gcloud has no account: run \`gcloud auth login\`"
  [ -n "$PROJECT$(gcloud config get-value project 2>/dev/null)" ] ||
    die "no project: give --project, or run \`gcloud config set project\`"
}

look() { # COMMAND…: prints the state that gcloud answers, ABSENT where there is nothing; fails after TRIES failures in a row
  local answer errors said code tried
  for ((tried = 1; ; tried++)); do
    errors="$(mktemp)" # apart from the answer: a warning is no state
    code=0
    answer="$(gcloud "$@" "$NAME" "${PLACE[@]}" 2>"$errors")" || code=$?
    said="$(cat "$errors")"
    rm -f "$errors"
    [ "$code" != 0 ] || break
    case "$said" in *NOT_FOUND*) answer=ABSENT && break ;; esac
    [ "$tried" -lt "$TRIES" ] || fail "$said"
    echo "$(basename "$0"): $said (asking again in $POLL_S s)" >&2
    sleep "$POLL_S"
  done
  echo "$answer"
}

state() { look compute tpus tpu-vm describe '--format=value(state)'; } # of the TPU

queued_state() { look compute tpus queued-resources describe '--format=value(state.state)'; } # of its queued resource

apply() { # MANIFEST PLATFORM: filled in, and given to Kubernetes
  local filled flags
  case "$WORKDIR" in gs://*) ;; *) die "--workdir: pods see no file system together; give gs://…" ;; esac
  train_words
  flags="$(xla_flags "$2")"
  filled="$(NAME="$NAME" NAMESPACE="$NAMESPACE" HOSTS="$HOSTS" DEVICES="$DEVICES" IMAGE="$IMAGE" TOPOLOGY="$TOPOLOGY" \
    ACCELERATOR="$ACCELERATOR" SLICES="$SLICES" FLAGS="$flags" python3 - "$1" "${WORDS[@]}" <<'PYTHON'
import json, os, string, sys

quoted = {"WORDS": json.dumps(sys.argv[2:]), "FLAGS": json.dumps(os.environ["FLAGS"])}  # YAML reads JSON
print(string.Template(open(sys.argv[1]).read().split("\n", 1)[1]).substitute(os.environ | quoted), end="")
PYTHON
  )"
  if [ -n "$DRY_RUN" ]; then
    echo "$filled"
    return
  fi
  command -v kubectl >/dev/null || die "kubectl is not installed, or try --dry-run"
  kubectl config current-context >/dev/null 2>&1 || die "kubectl has no context: see \`kubectl config get-contexts\`"
  echo "$filled" | kubectl apply -f -
}
