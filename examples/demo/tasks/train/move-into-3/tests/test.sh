#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -d docs ] && reward=0.3
[ -f docs/memo.txt ] && [ ! -e memo.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
