"""The shapes of the parameters of well-known models, for benches of optimizers."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

BERT_LAYERS, BERT_EMBED, BERT_MLP, BERT_VOCAB, BERT_POSITIONS = 12, 768, 3072, 30522, 512
RESNET_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""The number of blocks of each stage, and their width; a block outputs 4 times as many channels.
"""


def bert_base() -> Shapes:
    """Return BERT-base (Devlin et al., arXiv 1810.04805): 109.5M parameters in 199 tensors."""
    wide, mlp = BERT_EMBED, BERT_MLP
    shapes: Shapes = {
        "embeddings/word": (BERT_VOCAB, wide),
        "embeddings/position": (BERT_POSITIONS, wide),
        "embeddings/type": (2, wide),
        **_norm("embeddings/norm", wide),
    }
    for layer in range(BERT_LAYERS):
        for name in ("query", "key", "value", "out"):
            shapes |= _dense(f"layer{layer}/{name}", wide, wide)
        shapes |= _dense(f"layer{layer}/up", wide, mlp) | _dense(f"layer{layer}/down", mlp, wide)
        shapes |= _norm(f"layer{layer}/norm1", wide) | _norm(f"layer{layer}/norm2", wide)
    return shapes | _dense("pooler", wide, wide)


def resnet50() -> Shapes:
    """Return ResNet-50 (He et al., arXiv 1512.03385): 25.6M parameters in 161 tensors."""
    shapes: Shapes = {"stem/kernel": (7, 7, 3, 64), **_norm("stem/norm", 64)}
    channels = 64
    for stage, (blocks, width) in enumerate(RESNET_STAGES):
        for block in range(blocks):
            name, out = f"stage{stage}/block{block}", 4 * width
            sides = ((1, channels, width), (3, width, width), (1, width, out))
            for number, (side, source, target) in enumerate(sides):
                shapes |= _convolution(f"{name}/conv{number}", side, source, target)
            if block == 0:
                shapes |= _convolution(f"{name}/shortcut", 1, channels, out)
            channels = out
    return shapes | _dense("head", channels, 1000)


def _dense(name: str, source: int, target: int) -> Shapes:
    return {f"{name}/kernel": (source, target), f"{name}/bias": (target,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}/scale": (size,), f"{name}/bias": (size,)}


def _convolution(name: str, side: int, source: int, target: int) -> Shapes:
    kernel = {f"{name}/kernel": (side, side, source, target)}
    return kernel | _norm(f"{name}/norm", target)
