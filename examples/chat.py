"""Ask one question with the `openai` client."""

import os

from openai import OpenAI

url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ENGINE_API_KEY", "none"))

answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is gravity?"},
    ],
    max_tokens=60,
    temperature=0,
)
print(answer.choices[0].message.content)
