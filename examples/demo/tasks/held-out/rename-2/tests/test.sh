#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ "$(cat ticket.txt)" = "donkey" ] && reward=0.3 && [ ! -e budget.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
