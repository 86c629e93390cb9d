"""Generate from Python, without a server."""

from engine import LLM, SamplingParams

with LLM(max_model_len=2048) as llm:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for request in llm.generate(["The capital of France is", "Two plus two is"], params):
        print(request.prompt, "->", request.outputs[0].text)
    [answer] = llm.chat([{"role": "user", "content": "What is gravity?"}], params)
    print(answer.outputs[0].text)
