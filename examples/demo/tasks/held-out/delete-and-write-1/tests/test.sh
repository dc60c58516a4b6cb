#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ ! -e poem.txt ] && reward=0.3 && [ "$(cat letter.txt)" = "turtle" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
