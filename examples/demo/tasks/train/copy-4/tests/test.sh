#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ "$(cat plan.txt)" = "ladder" ] && reward=0.3 && [ "$(cat story.txt)" = "ladder" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
