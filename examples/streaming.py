"""Print tokens as they are generated, then how many there were."""

import os

from openai import OpenAI

url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ENGINE_API_KEY", "none"))

stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Tell me a story about a lighthouse."}],
    max_tokens=60,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")
