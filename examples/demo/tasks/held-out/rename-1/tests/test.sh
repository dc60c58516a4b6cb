#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ "$(cat song.txt)" = "barrel" ] && reward=0.3 && [ ! -e diary.txt ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
