#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f menu.txt ] && grep -q "recipe.txt" menu.txt && grep -q "sketch.txt" menu.txt && reward=0.3
[ "$(sort menu.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
