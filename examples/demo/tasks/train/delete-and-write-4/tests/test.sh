#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ ! -e memo.txt ] && reward=0.3 && [ "$(cat info.txt)" = "magnet" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
