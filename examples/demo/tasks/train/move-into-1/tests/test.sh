#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -d music ] && reward=0.3
[ -f music/names.txt ] && [ ! -e names.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
