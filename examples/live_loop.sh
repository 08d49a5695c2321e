#!/usr/bin/env bash
# The live loop with curl: sample, score, train, wait; the next round samples from the improved policy.
#
#   groupwise serve                        # in another terminal
#   bash examples/live_loop.sh             # ROUNDS=3 URL=http://host:8420 OUTPUT_NAME=sums by default
#
# It needs only curl and python3; python3 makes the questions, scores the replies and reads fields of the JSON.
set -euo pipefail

URL=${URL:-${GROUPWISE_URL:-http://127.0.0.1:8420}}
ROUNDS=${ROUNDS:-3} PROMPTS=${PROMPTS:-32} OUTPUT_NAME=${OUTPUT_NAME:-sums}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
echo "Authorization: Bearer ${GROUPWISE_API_KEY:-none}" > "$WORK/key" # in a file: command lines are public

call() { # call METHOD PATH [BODY.json]: the answer; an error is shown and ends the script
    local answer
    answer=$(mktemp -p "$WORK")
    if ! curl --silent --show-error --fail-with-body --max-time 600 --request "$1" "$URL$2" --output "$answer" \
        --header "Content-Type: application/json" --header @"$WORK/key" ${3:+--data "@$3"}; then
        cat "$answer" <(echo) >&2
        return 1
    fi
    cat "$answer"
}
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

for round in $(seq "$ROUNDS"); do
    # 1. sample: eight completions of each question
    python3 - "$PROMPTS" > "$WORK/ask.json" <<'PY'
import json, random, sys
ask = lambda: f"What is {random.randint(10, 999)} + {random.randint(10, 99)}? Think step by step."
prompts = [[{"role": "user", "content": ask()}] for _ in range(int(sys.argv[1]))]
print(json.dumps({"prompts": prompts, "n": 8, "temperature": 1.0, "max_tokens": 48}))
PY
    call POST /v1/completions/batch "$WORK/ask.json" > "$WORK/completions.json"

    # 2. score: 1 if the last number in the reply is the sum; texts and rewards are all that is posted
    python3 - "$WORK" "$OUTPUT_NAME" "$round" <<'PY'
import json, re, sys
work, output_name, round_number = sys.argv[1:]
prompts = json.load(open(f"{work}/ask.json"))["prompts"]
groups = [{"messages": messages, "completions": []} for messages in prompts]
for completion in json.load(open(f"{work}/completions.json"))["completions"]:
    group = groups[completion["prompt_index"]]
    a, b = map(int, re.findall(r"\d+", group["messages"][-1]["content"]))
    numbers = re.findall(r"-?\d+", completion["text"])
    reward = float(bool(numbers) and int(numbers[-1]) == a + b)
    group["completions"].append({"text": completion["text"], "reward": reward})
rewards = [completion["reward"] for group in groups for completion in group["completions"]]
print(f"round {round_number}  mean reward {sum(rewards) / len(rewards):.3f}")
config = {"output_name": output_name, "learning_rate": 1.5e-3, "kl_coeff": 0, "minibatches": 4}
json.dump({"groups": groups, "config": config}, open(f"{work}/train.json", "w"))
PY

    # 3. train: the job is queued, and on the server's disk, when this returns
    submitted=$(call POST /v1/train/grpo "$WORK/train.json")
    job=$(field job_id <<< "$submitted")

    # 4. wait: "completed" means that the new version is the one that answers
    for _ in $(seq 1200); do
        status=$(call GET "/v1/train/status/$job")
        state=$(field state <<< "$status")
        case $state in
            completed) break ;;
            failed | cancelled) echo "$status" >&2; exit 5 ;;
        esac
        sleep 0.5
    done
    [ "$state" = completed ] || { echo "job $job is still $state" >&2; exit 75; }
done

call GET /v1/adapters | python3 -m json.tool
