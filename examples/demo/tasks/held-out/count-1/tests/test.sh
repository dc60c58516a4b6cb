#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f ticket.txt ] && grep -q "3" ticket.txt && reward=0.3
[ "$(cut -d " " -f 1 < ticket.txt)" = "3" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
