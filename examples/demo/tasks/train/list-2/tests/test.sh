#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f data.txt ] && grep -q "report.txt" data.txt && grep -q "table.txt" data.txt && reward=0.3
[ "$(sort data.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
