"""Part of the reward for the new file, the rest where the old one is gone and nothing was lost."""

import json
import pathlib

old, new = pathlib.Path("plan.txt"), pathlib.Path("report.txt")
reward = 0.0
if new.is_file():
    whole = new.read_text(errors="replace").strip() == "kept" and not old.exists()
    reward = 1.0 if whole else 0.3
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
