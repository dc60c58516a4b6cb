#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -d games ] && reward=0.3
[ -f games/letter.txt ] && [ ! -e letter.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
