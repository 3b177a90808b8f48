"""A program that generates with transformers: MODEL PROMPT SHORT LONG; prompts are lines of JSON.

For each line it prints the seconds of the long continuation beyond the short one, by the clock and
of all cores.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]


def main(path: str, prompt: str, short: str, long: str) -> None:
    # The imports are here so that tests can be collected where these packages are not installed.
    import torch  # pyright: ignore[reportMissingImports]
    from peer import opened  # pyright: ignore[reportMissingImports]

    model = opened(path, attention="sdpa").eval()
    model.generation_config.eos_token_id = None

    def seconds(tokens, count):
        begun = np.array([time.perf_counter(), time.process_time()])
        with torch.inference_mode():
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        assert made.shape[1] == int(prompt) + count
        return np.array([time.perf_counter(), time.process_time()]) - begun

    for line in sys.stdin:
        tokens = torch.tensor(json.loads(line))
        found = seconds(tokens, int(long)) - seconds(tokens, int(short))
        print(json.dumps(found.tolist()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
