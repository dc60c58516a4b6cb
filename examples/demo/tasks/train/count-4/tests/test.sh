#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f data.txt ] && grep -q "2" data.txt && reward=0.3
[ "$(cut -d " " -f 1 < data.txt)" = "2" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
