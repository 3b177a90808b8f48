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
        f"grad {name}": grad
        for fused, parameter in model.named_parameters()
        if parameter.grad is not None
        for name, grad in in_files(fused, parameter.grad.numpy())
    }
    np.savez(out, loss=loss.item(), logits=logits.detach().numpy(), **grads)


def in_files(name, value):
    """Yield a parameter by the names of files, in which each expert has tensors of its own."""
    before, mlp, after = name.partition(".mlp.")
    moe = f"{before}.block_sparse_moe."
    if mlp and after == "gate.weight":
        yield f"{moe}gate.weight", value
    elif mlp and after == "experts.down_proj":
        yield from ((f"{moe}experts.{i}.w2.weight", one) for i, one in enumerate(value))
    elif mlp and after == "experts.gate_up_proj":
        for i, one in enumerate(value):
            half = len(one) // 2
            yield f"{moe}experts.{i}.w1.weight", one[:half]
            yield f"{moe}experts.{i}.w3.weight", one[half:]
    else:
        yield name, value


if __name__ == "__main__":
    main(*sys.argv[1:])
