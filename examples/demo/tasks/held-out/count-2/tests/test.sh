#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f menu.txt ] && grep -q "4" menu.txt && reward=0.3
[ "$(cut -d " " -f 1 < menu.txt)" = "4" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
