#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
grep -q "pepper" story.txt && ! grep -q "forest" story.txt && reward=0.3
[ "$(cat story.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
