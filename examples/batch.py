"""Send many prompts at once. The server batches them; the answers come back in order."""

import asyncio
import os

from openai import AsyncOpenAI

url = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
count = int(os.environ.get("COUNT", "100"))


async def main() -> None:
    """Send all prompts at the same time and print the answers."""
    client = AsyncOpenAI(
        base_url=f"{url}/v1", api_key=os.environ.get("ENGINE_API_KEY", "none"), timeout=600
    )
    model = (await client.models.list()).data[0].id

    async def square(number: int) -> str:
        answer = await client.completions.create(
            model=model, prompt=f"{number} times {number} is", max_tokens=5, temperature=0
        )
        return answer.choices[0].text

    for number, text in enumerate(await asyncio.gather(*map(square, range(count)))):
        print(number, text.strip())


asyncio.run(main())
