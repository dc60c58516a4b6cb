#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -d maps ] && reward=0.3
[ -f maps/poem.txt ] && [ ! -e poem.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
