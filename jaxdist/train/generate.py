"""The generation of text by a next-token model, for a batch of prompts in a compiled loop.

A decoder caches its keys and values (`jaxdist.train.decode`). Any other model of tokens computes
its entire window again for each token. A decoder does the same as soon as a text is longer than the
window, because each further token then changes every token's position in the window.

Dims: B texts, N tokens of the longest text, W window, L positions of a forward pass, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.train import decode
from jaxdist.train.sampling import Sampling
from jaxdist.train.step import Program
from jaxdist.types import Buffers, Params, PyTree

PIECE = 64
"""The number to whose multiples prompts and caches are padded, so that few shapes are compiled and
products are exact."""


class Text(NamedTuple):
    """A prompt and its continuation.

    Attributes:
      tokens: the tokens of the prompt and of the continuation; if a stop token ended the text, that
        token is the last.
      log_probs: the logarithm of each added token's probability at temperature 1, or None if
        log-probabilities were not requested.
      stopped: whether a stop token ended the text.
    """

    tokens: list[int]
    log_probs: list[float] | None
    stopped: bool


class _Loop(NamedTuple):
    """The state of the loop over tokens.

    Attributes:
      tokens: the texts so far, int32 `[B, N]`, padded with 0.
      length: the length of each text so far, int32 `[B]`.
      logits: the logits of each text's next token, float32 `[B, V]`.
      nats: the logarithm of the probability of each added token, float32 `[B, N]`.
      done: whether a stop token has ended each text, bool `[B]`.
      number: the number of tokens added so far to each text that is not done.
      cache: the keys and values, or None without a cache.
    """

    tokens: jax.Array
    length: jax.Array
    logits: jax.Array
    nats: jax.Array
    done: jax.Array
    number: jax.Array
    cache: PyTree


def generate(
    program: Program,
    params: Params,
    buffers: Buffers,
    *,
    prompts: Sequence[Sequence[int]],
    window: int,
    vocab_size: int,
    count: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    log_probs: bool = False,
    cached: bool = True,
) -> list[Text]:
    """Continue each prompt by at most `count` tokens, and return the texts.

    Each added token depends on at most `window` tokens before it. With `log_probs`, the forward
    pass of training runs once on the finished texts, in the shapes of training. Up to the length of
    the window, the log-probabilities therefore equal those of training to the bit.

    Args:
      params: the parameters, in the form in which the program stores them.
      prompts: the tokens of each prompt, at least one token.
      window: the length of the sequences that the model was trained on.
      vocab_size: the number of tokens in the vocabulary, without the padding of the head.
      count: the most tokens to add to a prompt.
      stops: the tokens that end a text.
      log_probs: whether to compute log-probabilities.
      cached: whether a decoder may cache its keys and values.
    """
    model = replace(program.model, adapters=())
    merged = jax.jit(lambda p: program.model.merged(program.home.used_params(p)))(params)
    run = _Run(program, model, buffers, window, vocab_size, sampling, tuple(stops))
    rows = -(-len(prompts) // program.layout.data_size) * program.layout.data_size
    # Rows are padded with copies of the last prompt, which are cut off at the end.
    filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
    lengths = np.array([len(p) for p in filled], np.int32)
    tokens = np.zeros((rows, max(lengths) + count), np.int32)
    for row, prompt in zip(tokens, filled, strict=True):
        row[: len(prompt)] = prompt
    batch = program.layout.sharding(("batch",))
    placed = jax.device_put(tokens, batch), jax.device_put(lengths, batch)
    fits = max(lengths) <= window
    loop = None
    if cached and fits and decode.reason_against(model, program.layout) is None:
        loop = run.with_cache(merged, *placed, int(max(lengths)), count)
    loop = run.without_cache(merged, *placed, loop, count)
    nats = run.scored(merged, loop) if log_probs else loop.nats
    arrays = map(np.asarray, (loop.tokens, loop.length, nats, loop.done))
    texts = []
    for prompt, tokens_N, length, nats_N, done in zip(prompts, *arrays, strict=False):
        added = nats_N[len(prompt) : length].tolist() if log_probs else None
        texts.append(Text(tokens_N[:length].tolist(), added, bool(done)))
    return texts


@dataclass(frozen=True)
class _Run:
    """The compiled loops of a call of `generate`."""

    program: Program
    model: Any
    buffers: Buffers
    window: int
    vocab_size: int
    sampling: Sampling
    stops: tuple[int, ...]

    def with_cache(
        self, params: Params, tokens_BN: jax.Array, length_B: jax.Array, longest: int, count: int
    ) -> _Loop:
        """Add tokens with a cache, until all are added or until a text fills the window.

        Args:
          tokens_BN: the prompts, padded with 0.
          length_B: the length of each prompt.
          longest: the length of the longest prompt.
          count: the most tokens to add to a prompt.
        """
        on_cpu = self.program.layout.mesh.devices.flat[0].platform == "cpu"
        turned = partial(decode.turned, self.model)
        kept = jax.jit(turned)(params) if on_cpu else params
        ahead = min(self.window, -(-longest // PIECE) * PIECE)
        size = min(self.window, -(-(longest + count) // PIECE) * PIECE)

        def bound(kept: Params) -> Any:
            return self._bound(turned(kept, back=True) if on_cpu else kept)

        def step(kept: Params, loop: _Loop) -> tuple[jax.Array, PyTree]:
            module, at_B1 = bound(kept), loop.length[:, None] - 1
            token_B1 = jnp.take_along_axis(loop.tokens, at_B1, 1)
            given = token_B1, at_B1, loop.cache
            x_B1D, cache = decode.decode(module, *given, window=self.window)
            return self._cut(module.head(x_B1D)[:, 0]), cache

        @jax.jit
        def begin(kept: Params, tokens_BN: jax.Array, length_B: jax.Array) -> _Loop:
            module = bound(kept)
            missing = max(0, ahead - tokens_BN.shape[1])
            tokens_BL = jnp.pad(tokens_BN, ((0, 0), (0, missing)))[:, :ahead]
            at_BL = jnp.broadcast_to(jnp.arange(ahead)[None], tokens_BL.shape)
            cache = decode.empty_cache(module, tokens_BN.shape[0], max(size, ahead))
            x_BLD, cache = decode.decode(module, tokens_BL, at_BL, cache, window=self.window)
            last_B11 = length_B[:, None, None] - 1
            logits_BV = module.head(jnp.take_along_axis(x_BLD, last_B11, 1))[:, 0]
            return self._begun(tokens_BN, length_B, self._cut(logits_BV), cache)

        loop = begin(kept, tokens_BN, length_B)
        found = self._looped(step, kept, loop, count, self.window)
        return found._replace(cache=None)

    def without_cache(
        self,
        params: Params,
        tokens_BN: jax.Array,
        length_B: jax.Array,
        loop: _Loop | None,
        count: int,
    ) -> _Loop:
        """Add the remaining tokens, with a forward pass over the window for each token.

        Args:
          loop: the state after `with_cache`, or None if no token was added yet.
        """

        def step(params: Params, loop: _Loop) -> tuple[jax.Array, None]:
            missing = max(0, self.window - loop.tokens.shape[1])
            tokens_BN = jnp.pad(loop.tokens, ((0, 0), (0, missing)))
            begin_B1 = jnp.maximum(loop.length[:, None] - self.window, 0)
            tokens_BL = jnp.take_along_axis(tokens_BN, begin_B1 + jnp.arange(self.window)[None], 1)
            logits_BLV = self._bound(params)(tokens_BL, jnp.zeros_like(tokens_BL))
            last_B11 = jnp.minimum(loop.length, self.window)[:, None, None] - 1
            return self._cut(jnp.take_along_axis(logits_BLV, last_B11, 1)[:, 0]), None

        if loop is None:
            nothing = jnp.zeros((len(tokens_BN), self.vocab_size), jnp.float32)
            loop = self._begun(tokens_BN, length_B, nothing, None)
            loop = loop._replace(logits=jax.jit(step)(params, loop)[0])
        elif int(loop.number) == count or bool(loop.done.all()):
            return loop
        return self._looped(step, params, loop, count, None)

    def _begun(
        self, tokens_BN: jax.Array, length_B: jax.Array, logits_BV: jax.Array, cache: PyTree
    ) -> _Loop:
        nats_BN, done_B = jnp.zeros(tokens_BN.shape, jnp.float32), jnp.zeros(len(length_B), bool)
        return _Loop(tokens_BN, length_B, logits_BV, nats_BN, done_B, jnp.int32(0), cache)

    def _looped(
        self,
        step: Callable[[Params, _Loop], tuple[jax.Array, PyTree]],
        params: Params,
        loop: _Loop,
        count: int,
        most: int | None,
    ) -> _Loop:
        """Run the loop until `count` tokens are added, all texts are done, or a text is too long.

        Args:
          step: a function that returns the logits of the next token, and the next cache.
          most: the length at which a text ends the loop unless it is done; None sets no limit.
        """
        stops = jnp.asarray(self.stops or (-1,), jnp.int32)[None]

        def goes_on(loop: _Loop) -> jax.Array:
            longest = jnp.where(loop.done, 0, loop.length).max()
            fits = True if most is None else longest < most
            return ~loop.done.all() & (loop.number < count) & fits

        def add(params: Params, loop: _Loop) -> _Loop:
            token_B = self.sampling.draw(loop.logits, loop.number)
            nats_B = -optax.softmax_cross_entropy_with_integer_labels(loop.logits, token_B)
            rows = jnp.arange(len(token_B))
            # The index of a text that is done is outside of its buffer, so jax drops the write.
            at_B = jnp.where(loop.done, loop.tokens.shape[1], loop.length)
            added = loop._replace(
                tokens=loop.tokens.at[rows, at_B].set(token_B, mode="drop"),
                nats=loop.nats.at[rows, at_B].set(nats_B, mode="drop"),
                length=loop.length + ~loop.done,
                done=loop.done | (token_B[:, None] == stops).any(-1),
                number=loop.number + 1,
            )
            logits_BV, cache = step(params, added)
            return added._replace(logits=logits_BV, cache=cache)

        @partial(jax.jit, donate_argnums=1)
        def run(params: Params, loop: _Loop) -> _Loop:
            return jax.lax.while_loop(goes_on, partial(add, params), loop)

        return run(params, loop)

    def scored(self, params: Params, loop: _Loop) -> jax.Array:
        """Return the log-probabilities `[B, N]` of texts, from the forward pass of training."""

        @jax.jit
        def score(params: Params, tokens_BN: jax.Array) -> jax.Array:
            missing = max(0, self.window + 1 - tokens_BN.shape[1])
            tokens_BL = jnp.pad(tokens_BN, ((0, 0), (0, missing)))[:, : self.window + 1]
            inputs_BL, module = tokens_BL[:, :-1], self._bound(params)
            given = inputs_BL, jnp.zeros_like(inputs_BL)
            head = getattr(module, "padded_head", None)
            logits_BLV = module(*given) if head is None else head(module.hidden(*given))
            nats_BL = optax.softmax_cross_entropy_with_integer_labels(
                logits_BLV.astype(jnp.float32), tokens_BL[:, 1:]
            )
            return -jnp.pad(nats_BL, ((0, 0), (1, 0)))[:, : tokens_BN.shape[1]]

        rows = self.program.layout.data_size
        pieces = [
            score(params, loop.tokens[i : i + rows]) for i in range(0, len(loop.tokens), rows)
        ]
        nats_BL = jnp.concatenate(pieces)
        # The log-probabilities of tokens beyond the window were computed in the loop, each by a
        # forward pass over a separate window.
        return jnp.concatenate([nats_BL, loop.nats[:, nats_BL.shape[1] :]], 1)

    def _bound(self, params: Params) -> Any:
        module: Any = self.model.bind(params, self.buffers)
        module.eval()
        return module

    def _cut(self, logits_BV: jax.Array) -> jax.Array:
        return logits_BV[:, : self.vocab_size].astype(jnp.float32)
