"""Part of the reward for the file, the rest for exactly the word in it."""

import json
import pathlib

file, word = pathlib.Path("spring.txt"), "garden"
reward = 0.0
if file.is_file():
    reward = 1.0 if file.read_text(errors="replace").strip() == word else 0.3
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
