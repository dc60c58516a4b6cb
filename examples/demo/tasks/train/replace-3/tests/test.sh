#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
grep -q "garden" story.txt && ! grep -q "silver" story.txt && reward=0.3
[ "$(cat story.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
