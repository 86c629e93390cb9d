"""Get an answer that follows a JSON schema, as a typed object."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """The schema of the answer."""

    # Limits keep a small model from writing one field until `max_tokens` cuts the JSON.
    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    population: int = Field(ge=0, le=10**9)


url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ENGINE_API_KEY", "none"))

answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe Paris as JSON."}],
    response_format=City,
    max_tokens=100,
    temperature=0,
)
city = answer.choices[0].message.parsed
assert city is not None
print(f"{city.name}, {city.country}: {city.population} people")
