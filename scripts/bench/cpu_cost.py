"""What a streamed token costs the frontend and the core in CPU time, on a real server.

    scripts/bench/run cpu_cost [--model PATH] [-c 64 256] [--max-tokens 128]

Every stream has a connection of its own and starts with the others. Times are of whole processes, in
microseconds a token; a small model gives many tokens soon, the costs are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.parse

from local_server import LocalServer, local_server

WATCHED = ("frontend 0", "core 0")
PROMPT_TOKENS = 16


async def stream(host: str, port: int, request: bytes, started: asyncio.Barrier) -> int:
    """Returns the number of events."""
    reader, writer = await asyncio.open_connection(host, port)
    await started.wait()
    writer.write(request)
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered {answer[:200]!r}")
    return answer.count(b"data: {")


async def measure(server: LocalServer, streams: int, max_tokens: int) -> dict[str, float]:
    address = urllib.parse.urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    started = asyncio.Barrier(streams + 1)

    def request(number: int) -> bytes:
        body = json.dumps(
            {
                "model": "cost",
                "prompt": [1000 + number] * PROMPT_TOKENS,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    tasks = [
        asyncio.create_task(stream(address.hostname, address.port, request(i), started))
        for i in range(streams)
    ]
    await started.wait()
    before = {name: server.processes[name].cpu_times() for name in WATCHED}
    begin = time.perf_counter()
    events = sum(await asyncio.gather(*tasks))
    seconds = time.perf_counter() - begin
    tokens = streams * max_tokens
    result: dict[str, float] = {
        "streams": streams,
        "output_tok_s": round(tokens / seconds, 1),
        "events_a_token": round(events / tokens, 3),
    }
    for name in WATCHED:
        after, kind = server.processes[name].cpu_times(), name.split()[0]
        result[f"{kind}_user_us"] = round((after.user - before[name].user) / tokens * 1e6, 2)
        result[f"{kind}_system_us"] = round((after.system - before[name].system) / tokens * 1e6, 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("-c", "--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("serve", nargs="*", help="more arguments of `engine serve`")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    slots = ["--max-num-seqs", str(max(arguments.streams)), "--served-model-name", "cost"]
    with local_server([*model, *slots, *arguments.serve]) as server:
        asyncio.run(measure(server, 8, 16))
        for streams in arguments.streams * arguments.rounds:
            print(json.dumps(asyncio.run(measure(server, streams, arguments.max_tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
