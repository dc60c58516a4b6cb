#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f index.txt ] && grep -q "items.txt" index.txt && grep -q "result.txt" index.txt && reward=0.3
[ "$(sort index.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
