#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f draft.txt ] && reward=0.3
[ "$(cat draft.txt)" = "violin" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
