"""A program that computes a model's logits, loss and gradients: DIR GIVEN.npz OUT.npz.

It uses transformers, and nothing of jaxdist.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np


def main(path: str, given: str, out: str) -> None:
    # The imports are here so that tests can be collected where these packages are not installed.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    arrays = {name: torch.from_numpy(value) for name, value in np.load(given).items()}
    labels = arrays.pop("labels").reshape(-1)
    model = opened(path).eval()
    if isinstance(model, transformers.BertModel):
        logits = model(**arrays).last_hidden_state[0]
        loss = logits.square().mean()
    else:
        logits = model(**arrays).logits
        logits = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(logits[: len(labels)], labels)
    found = {}
    if Path(path).is_dir():  # a GGUF file has other names
        loss.backward()
        found = {f"grad {name}": value for name, value in gradients(model).items()}
    np.savez(out, loss=loss.item(), logits=logits.detach().numpy(), **found)


def opened(path, attention="eager"):
    """Return the model of a directory, or of a GGUF file, in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    if Path(path).is_file():
        place = {"pretrained_model_name_or_path": Path(path).parent, "gguf_file": Path(path).name}
        return transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = json.loads((Path(path) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    more = {} if config["model_type"] == "resnet" else {"attn_implementation": attention}
    return kind.from_pretrained(path, dtype=torch.float32, **more)


def gradients(model):
    """Return the gradients by the names that files have, as transformers itself converts them."""
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file  # pyright: ignore[reportMissingImports]

    for parameter in model.parameters():
        held = parameter.grad
        parameter.data = torch.zeros_like(parameter) if held is None else held.contiguous()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    kept = (".running_mean", ".running_var", ".num_batches_tracked")
    return {name: value for name, value in found.items() if not name.endswith(kept)}


if __name__ == "__main__":
    main(*sys.argv[1:])
