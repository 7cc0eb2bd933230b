#!/usr/bin/env bash
# The server against programs of others, in two pinned environments; needs a network for pip, so
# .ci/run leaves it out. Environment a: the openai client 2.x, lm-eval, guidellm; b: openai 3.x.
# Usage: tools/external.sh          prints a table, exit code 1 when something failed
#   K3='python -m k3_core.cli.app'  the command k3, where it is not installed as `k3`
#   K3_ENVS='b'                     only this environment
# Logs and reports are left in runs/external.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$PWD/runs/external
here=$PWD/tools/external
read -r -a k3 <<< "${K3:-k3}"
mkdir -p "$out"

# The environments must not see packages of the checkout, and no program may ask a hub.
clean() { env -u PYTHONPATH HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$out/hf" "$@"; }

for name in ${K3_ENVS:-a b}; do
    if ! cmp -s "$here/$name.txt" "$out/$name/installed.txt"; then
        python3 -m venv --clear "$out/$name"
        clean "$out/$name/bin/python" -m pip install --quiet --disable-pip-version-check \
            -r "$here/$name.txt" > "$out/pip-$name.log" 2>&1 || { tail "$out/pip-$name.log"; exit 1; }
        cp "$here/$name.txt" "$out/$name/installed.txt"
    fi
done

"${k3[@]}" serve k3-nano --port 0 --experts dequantized > "$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
url=
for _ in $(seq 240); do
    url=$(sed -n 's/.*listening on \(http[^ ]*\)$/\1/p' "$out/server.log")
    [ -n "$url" ] && break
    kill -0 $server || { cat "$out/server.log"; exit 1; }
    sleep 0.5
done
[ -n "$url" ] || { echo "the server did not start; see $out/server.log"; exit 1; }

table=()
failed=0
try() { # NAME COMMAND...: runs it with its output in a log, adds a line to the table
    local name=$1 begin=$SECONDS verdict=pass
    shift
    "$@" > "$out/$name.log" 2>&1 || { verdict=FAIL; failed=1; tail -n 30 "$out/$name.log"; }
    table+=("$(printf '%-22s %-5s %4d s' "$name" "$verdict" $((SECONDS - begin)))")
}

model_dir=$PWD/packages/k3-core/src/k3_core/assets/k3-nano  # for its tokenizer.json
lm_eval() {
    cd "$here/tasks"  # the files of the tasks are beside them
    clean "$out/a/bin/python" -m lm_eval --model local-completions --include_path . \
        --model_args "model=k3-nano,base_url=$url/v1/completions,num_concurrent=4,max_retries=1" \
        --tasks k3_choice,k3_greedy --batch_size 4 --output_path "$out/lm_eval" --log_samples
}
guidellm() {
    clean "$out/a/bin/guidellm" run --disable-console-interactive \
        --backend "kind=openai_http,target=$url,model=k3-nano,request_format=/v1/completions" \
        --profile kind=concurrent,streams=4 --constraint kind=max_duration,seconds=30 \
        --data kind=synthetic_text,prompt_tokens=128,output_tokens=32 \
        --tokenizer "kind=hf_auto,model=$model_dir" \
        --output "kind=json,path=$out/guidellm.json"
    "$out/a/bin/python" "$here/guidellm_check.py" "$out/guidellm.json"
}

for name in ${K3_ENVS:-a b}; do
    try "openai-$name" clean "$out/$name/bin/python" "$here/openai_matrix.py" "$url"
    if [ "$name" = a ]; then
        try lm-eval lm_eval
        try guidellm guidellm
    fi
done
kill -0 $server || { echo "the server died; see $out/server.log"; failed=1; }

grep -hE ' (pass|FAIL)  |passed$|^openai ' "$out"/openai-*.log || true
grep -hE '^\|' "$out/lm-eval.log" || true
grep -hE '^(\{|time_|inter_|output_)' "$out/guidellm.log" || true
printf '%s\n' "${table[@]}"
exit $failed
