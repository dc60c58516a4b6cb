#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ -f budget.txt ] && grep -q "review.txt" budget.txt && grep -q "ticket.txt" budget.txt && reward=0.3
[ "$(sort budget.txt)" = "$(cat /tests/expected)" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
