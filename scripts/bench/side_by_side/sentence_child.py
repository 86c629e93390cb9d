"""Embed texts with sentence-transformers in its own process, for the benchmark `embeddings`.

    python sentence_child.py MODEL BACKEND

BACKEND is "torch", "onnx", "openvino", or "openvino-f32" for OpenVINO without bfloat16. It answers as `child.Child`
expects. Each question has `batches`, lists of texts, which are embedded one after the other. The answer has the
`seconds`, and with `has_vectors` the `vectors` of the last list.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    path, backend = sys.argv[1:]
    try:
        from sentence_transformers import SentenceTransformer

        name, _, precision = backend.partition("-")
        config = {"ov_config": {"INFERENCE_PRECISION_HINT": precision}} if precision else {}
        model = SentenceTransformer(path, backend=name, device="cpu", model_kwargs=config)
        model.encode(["warm up"])
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        vectors: Any = []
        start = time.perf_counter()
        for batch in question["batches"]:
            vectors = model.encode(batch, batch_size=len(batch), show_progress_bar=False)
        seconds = time.perf_counter() - start
        answer = {
            "seconds": seconds,
            "vectors": vectors.tolist() if question["has_vectors"] else [],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
