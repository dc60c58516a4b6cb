#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f report.txt ] && reward=0.3
[ "$(cat report.txt)" = "orange" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
