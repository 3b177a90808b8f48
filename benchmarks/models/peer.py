"""A program that computes logits, loss and gradients by transformers: DIR GIVEN.npz OUT.npz.

The program uses nothing of jaxdist.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np


def main(path: str, given: str, out: str) -> None:
    # The imports are here so that tests can be collected where these packages are not installed.
    import torch  # pyright: ignore[reportMissingImports]

    arrays = {name: torch.from_numpy(value) for name, value in np.load(given).items()}
    found = computed(path, opened(path).eval(), arrays)
    if Path(path).is_dir():
        # The angles of positions stay in float32, because models are trained with these angles.
        length = arrays["input_ids"].shape[1] if "input_ids" in arrays else 0
        wide = widened(opened(path).eval(), length)
        arrays = {n: x.double() if x.is_floating_point() else x for n, x in arrays.items()}
        found |= {f"exact {n}": x for n, x in computed(path, wide, arrays).items()}
    np.savez(out, **found)


def computed(path, model, arrays):
    """Return the loss and the logits of a model, and the gradients by the file's names."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    given = dict(arrays)
    labels = given.pop("labels").reshape(-1)
    if isinstance(model, transformers.BertModel):
        logits = model(**given).last_hidden_state[0]
        loss = logits.square().mean()
    else:
        logits = model(**given).logits
        logits = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(logits[: len(labels)], labels)
    found = {}
    if Path(path).is_dir():  # a GGUF file has other names
        loss.backward()
        found = {f"grad {name}": value for name, value in gradients(model).items()}
    return {"loss": np.asarray(loss.item()), "logits": logits.detach().numpy(), **found}


def widened(model, length):
    """Return a model in float64, except the angles of the positions below `length`.

    transformers computes norms and softmax in float32 even for a model in float64, so the name
    float32 is replaced in the model's module. No other model may be computed afterwards.
    """
    import torch  # pyright: ignore[reportMissingImports]

    class Wide:
        float32 = float = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    angles = getattr(getattr(model, "model", None), "rotary_emb", None)
    if angles is not None:
        tables = angles(torch.zeros(1), torch.arange(length)[None])
        angles.forward = lambda *_, **__: tuple(table.double() for table in tables)
    vars(sys.modules[type(model).__module__])["torch"] = Wide()
    torch.Tensor.float = torch.Tensor.double
    return model.double()


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
