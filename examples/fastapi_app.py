"""Serve your own routes with Engine inside the application: uvicorn fastapi_app:app."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine import LLM, SamplingParams
from fastapi import FastAPI


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engine's processes with the application, and stop them with it."""
    with LLM(max_model_len=2048) as llm:
        app.state.llm = llm
        yield


app = FastAPI(lifespan=lifespan)


# FastAPI runs functions that are not async in threads, and `LLM` may be called from several threads:
# concurrent requests share the engine's batch.
@app.get("/summary")
def summary(topic: str) -> dict[str, str]:
    """Return one sentence about a topic."""
    question = [{"role": "user", "content": f"Say one sentence about {topic}."}]
    [answer] = app.state.llm.chat(question, SamplingParams(max_tokens=40, temperature=0.0))
    return {"topic": topic, "summary": answer.outputs[0].text}
