"""Embed texts with sentence-transformers in its own process, for the benchmark `embeddings`.

    python sentence_child.py MODEL BACKEND

BACKEND is "torch", "onnx" or "openvino". It writes "ready", or "error: ..." and exits. Then each line of its input is a
JSON list of lists of texts, which it embeds one list after the other, and it answers with the seconds.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    path, backend = sys.argv[1:]
    try:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(path, backend=backend, device="cpu")
        model.encode(["warm up"])
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        batches = json.loads(line)
        start = time.perf_counter()
        for batch in batches:
            model.encode(batch, batch_size=len(batch), show_progress_bar=False)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
