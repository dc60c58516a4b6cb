#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f items.txt ] && grep -q "5" items.txt && reward=0.3
[ "$(cut -d " " -f 1 < items.txt)" = "5" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
