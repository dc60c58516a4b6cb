#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f log.txt ] && grep -q "3" log.txt && reward=0.3
[ "$(cut -d " " -f 1 < log.txt)" = "3" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
