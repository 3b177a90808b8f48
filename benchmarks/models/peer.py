"""A program that computes a model's logits, loss and gradients: DIR TOKENS.npy OUT.npz.

It uses transformers, and nothing of jaxdist.
"""

import sys

import numpy as np


def main(path: str, given: str, out: str) -> None:
    # The imports are here so that tests can be collected where these packages are not installed.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    tokens = torch.from_numpy(np.load(given))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits = model(tokens).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    loss.backward()
    grads = {
        f"grad {name}": parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    np.savez(out, loss=loss.item(), logits=logits.detach().numpy(), **grads)


if __name__ == "__main__":
    main(*sys.argv[1:])
