"""Transcribe files with faster-whisper in its own process, for the benchmark `speech`.

    python speech_child.py MODEL COMPUTE_TYPE WORKERS THREADS

It answers as `child.Child` expects. A question is a list of lists of paths, one for each client, and the answer has the
`seconds` and the `texts` of all paths.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    path, compute_type, workers, threads = sys.argv[1:]
    try:
        from faster_whisper import WhisperModel

        model = WhisperModel(
            path,
            device="cpu",
            compute_type=compute_type,
            num_workers=int(workers),
            cpu_threads=int(threads),
        )
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return

    def transcribe(paths: list[str]) -> list[str]:
        texts = []
        for each in paths:
            segments, _ = model.transcribe(
                each,
                language="en",
                beam_size=1,
                without_timestamps=True,
                condition_on_previous_text=False,
            )
            texts.append("".join(segment.text for segment in segments))
        return texts

    print("{}", flush=True)
    for line in sys.stdin:
        shares = json.loads(line)
        start = time.perf_counter()
        with ThreadPoolExecutor(len(shares)) as pool:
            texts = list(pool.map(transcribe, shares))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "texts": texts}), flush=True)


if __name__ == "__main__":
    main()
