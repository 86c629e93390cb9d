"""Let the model call a Python function."""

import json
import os

from openai import OpenAI


def get_weather(city: str) -> str:
    """Return the weather of a city. A real program would ask a weather service."""
    return f"It is sunny in {city}, 22 degrees."


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ENGINE_API_KEY", "none"))

answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the weather in Rome?"}],
    tools=TOOLS,
    # A model with tool calls in its chat template decides by itself ("auto"). This works with every model.
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=100,
    temperature=0,
)
for call in answer.choices[0].message.tool_calls or []:
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments}) -> {get_weather(**arguments)}")
