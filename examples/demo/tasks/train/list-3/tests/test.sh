#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f draft.txt ] && grep -q "notes.txt" draft.txt && grep -q "todo.txt" draft.txt && reward=0.3
[ "$(sort draft.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
