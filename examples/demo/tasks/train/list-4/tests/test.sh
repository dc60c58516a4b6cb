#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f list.txt ] && grep -q "plan.txt" list.txt && grep -q "story.txt" list.txt && reward=0.3
[ "$(sort list.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
