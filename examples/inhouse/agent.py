"""An in-house harness: asks the model for shell commands and runs them, until the model says DONE or three turns pass.

It knows nothing of training. Endpoint, key and model come from the environment, as in production.
"""

import os
import re
import subprocess
import sys

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
messages = [
    {"role": "system", "content": "Do the task with shell commands. Put one command in a ```bash block, or say DONE."},
    {"role": "user", "content": sys.argv[1]},
]
for _ in range(3):
    reply = client.chat.completions.create(model=os.environ["MODEL"], messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": reply})
    command = re.search(r"```bash\s*\n(.*?)\n```", reply or "", re.DOTALL)
    if command is None:
        break
    try:
        ran = subprocess.run(command[1], shell=True, capture_output=True, text=True, timeout=5)
        output = f"exit {ran.returncode}\n{(ran.stdout + ran.stderr)[:200]}"
    except subprocess.TimeoutExpired:
        output = "timed out"
    messages.append({"role": "user", "content": output})
