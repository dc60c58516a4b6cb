#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -d photos ] && reward=0.3
[ -f photos/log.txt ] && [ ! -e log.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
