#!/usr/bin/env bash
# Trains a ladder of five small models, each on three numbers of tokens, fits the scaling law, and predicts a sixth,
# twice as large, which is then trained and compared. What is done already is skipped.
#
#   bash scripts/scaling_ladder.sh [FOLDER]     the default: scaling; documents of a quickstart are taken from QUICKSTART, if set
set -euo pipefail
out=${1:-scaling}
documents=${QUICKSTART:-$out}/documents

# width, layers, heads of 16
rungs=("16 2 1" "24 2 1" "32 2 2" "48 2 3" "64 2 4")
lengths=(250 500 1000) # steps of 512 bytes
sixth="96 2 6" sixth_steps=1000

if [[ -z ${QUICKSTART:-} ]]; then
    lmjax corpus --out "$out/corpus"
    lmjax prepare --config configs/data/quickstart.py --documents "$out/corpus" --out "$out/prepared"
    lmjax split --documents "$out/prepared" --out "$documents" --config.validation=0.04 --config.test=0.04
fi
lmjax tokenizer --config configs/tokenizer/byte.py --out "$out/tokenizer"
lmjax tokenize --documents "$documents" --tokenizer "$out/tokenizer" --out "$out/shards"

train() { # workdir steps width layers heads
    lmjax train --config configs/scaling/ladder.py --workdir "$1" \
        --config.tokenizer="$out/tokenizer" --config.data.shards="$out/shards" --config.train.steps="$2" \
        --config.model.d_model="$3" --config.model.num_layers="$4" --config.model.num_heads="$5"
}

for rung in "${rungs[@]}"; do
    read -r width layers heads <<<"$rung"
    for steps in "${lengths[@]}"; do
        train "$out/runs/$width-$steps" "$steps" "$width" "$layers" "$heads"
    done
done
read -r width layers heads <<<"$sixth"
train "$out/sixth" "$sixth_steps" "$width" "$layers" "$heads"
lmjax scaling --runs "$out/runs" --against "$out/sixth" --budget 1e14 --plot "$out/scaling.svg"
