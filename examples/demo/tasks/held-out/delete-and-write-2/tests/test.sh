#!/bin/sh
# Judges what is in the working directory; part of the reward for part of the job.
reward=0
[ ! -e diary.txt ] && reward=0.3 && [ "$(cat song.txt)" = "ocean" ] && reward=1
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
