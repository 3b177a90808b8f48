"""A program that fine-tunes adapters with peft and trl: MODEL GIVEN.npz OUT.npz ADAPTERS.

It uses nothing of jaxdist.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

KEYS = "prompt", "chosen", "rejected"
sys.path[:0] = [str(Path(__file__).parent)]


def main(path: str, given: str, out: str, adapters: str) -> None:
    arrays = dict(np.load(given))
    found = {"text losses": text_losses(path, Path(adapters) / "text", arrays)}
    found["tuned loss"] = merged_loss(Path(adapters) / "merged", arrays)
    loss, grads = preferences(path, Path(adapters) / "dpo", arrays)
    found |= {"dpo loss": loss, **{f"grad {name}": value for name, value in grads.items()}}
    loss, grads = exact_preferences(path, Path(adapters) / "dpo", arrays)
    found |= {"exact loss": loss, **{f"exact {name}": value for name, value in grads.items()}}
    np.savez(out, allow_pickle=False, **found)


def text_losses(path, adapters, arrays):
    """Return the losses of steps of AdamW with peft."""
    # The imports are here so that tests can be collected where these packages are not installed.
    import torch  # pyright: ignore[reportMissingImports]
    from peer import opened  # pyright: ignore[reportMissingImports]
    from peft import PeftModel  # pyright: ignore[reportMissingImports]

    model = PeftModel.from_pretrained(opened(path), str(adapters), is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    rate, b1, b2, eps, decay = (
        float(arrays[name]) for name in ("rate", "b1", "b2", "eps", "weight_decay")
    )
    optimizer = torch.optim.AdamW(trained, rate, (b1, b2), eps, decay)
    losses = []
    for batch in torch.from_numpy(arrays["text"].astype(np.int64)):
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def merged_loss(path, arrays):
    """Return the loss of a model without adapters on the first batch."""
    import torch  # pyright: ignore[reportMissingImports]
    from peer import opened  # pyright: ignore[reportMissingImports]

    batch = torch.from_numpy(arrays["text"][0].astype(np.int64))
    with torch.inference_mode():
        logits = opened(path)(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


def preferences(path, adapters, arrays):
    """Return the loss of trl, and the gradients by the names of peft's files."""
    import datasets  # pyright: ignore[reportMissingImports]
    import peft  # pyright: ignore[reportMissingImports]
    import tokenizers  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from peer import opened  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    prompt, pairs = int(arrays["prompt"]), zip(arrays["pairs"], arrays["ends"], strict=True)
    rows = []
    for tokens, ends in pairs:
        answers = [row[prompt:end].tolist() for row, end in zip(tokens, ends, strict=True)]
        ids = {"chosen_ids": answers[0], "rejected_ids": answers[1]}
        rows.append({"prompt_ids": tokens[0, :prompt].tolist(), **ids})
    lora = peft.LoraConfig.from_pretrained(str(adapters))
    lora.inference_mode = False
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(
            folder,
            beta=float(arrays["beta"]),
            bf16=False,
            use_cpu=True,
            report_to=[],
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            max_length=None,
        )
        trainer = trl.DPOTrainer(
            opened(path),
            args=settings,
            # The data of the trainer itself are not used: batches are given as numbers.
            train_dataset=datasets.Dataset.from_list([dict.fromkeys(KEYS, "a")]),
            processing_class=tokenizer,
            peft_config=lora,
        )
    held = load_file(str(adapters / "adapter_model.safetensors"))
    peft.set_peft_model_state_dict(trainer.model, held)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    loss.backward()
    grads = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    assert grads.keys() == held.keys(), set(grads) ^ set(held)
    return loss.item(), grads


def exact_preferences(path, adapters, arrays):
    """Return the result of `preferences` for a llama in float64; nothing may run afterwards.

    transformers and trl compute norms, angles and log-probabilities in float32 even for a model in
    float64, so the name float32 is replaced in their modules.
    """
    import peer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import modeling_rope_utils  # pyright: ignore[reportMissingImports]
    from transformers.models.llama import modeling_llama  # pyright: ignore[reportMissingImports]
    from trl.kernels import chunked_logprob  # pyright: ignore[reportMissingImports]

    class Wide:
        float32 = float = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    narrow = peer.opened

    def opened(path):
        model = narrow(path).double()
        for module in (modeling_rope_utils, modeling_llama, chunked_logprob):
            module.torch = Wide()
        torch.Tensor.float = torch.Tensor.double
        model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(model.config)
        return model

    peer.opened = opened
    return preferences(path, adapters, arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
