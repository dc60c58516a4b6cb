#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f table.txt ] && reward=0.3
[ "$(cat table.txt)" = "needle" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
