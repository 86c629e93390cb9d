"""Find out why a request was slow: write the event log, then ask `engine replay` about the request.

The server must run with `--dump-dir DIR` on this machine.
"""

import json
import os
import subprocess
import sys
import urllib.request

from openai import OpenAI

url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
key = os.environ.get("ENGINE_API_KEY", "none")
client = OpenAI(base_url=f"{url}/v1", api_key=key)

# Every answer carries its request id; yours comes from the x-request-id header of the slow answer.
response = client.chat.completions.with_raw_response.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is gravity?"}],
    max_tokens=30,
)
request_id = response.headers["x-request-id"]

dump = urllib.request.Request(
    f"{url}/debug/dump", method="POST", headers={"Authorization": f"Bearer {key}"}
)
with urllib.request.urlopen(dump) as answer:
    files = json.load(answer)["files"]

# There is a file for each replica, and one of them has the request.
for file in files:
    command = [sys.executable, "-m", "engine.core.replay", file, "--why", request_id]
    replay = subprocess.run(command, check=False, capture_output=True, text=True)
    if replay.returncode == 0:
        print(replay.stdout)
        sys.exit()
sys.exit(replay.stderr)
