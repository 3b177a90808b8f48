"""The generation of text by a next-token model, for a batch of prompts in a compiled loop.

A decoder caches its keys and values (`jaxdist.train.decode`). Any other model of tokens computes
its entire window again for each token. A decoder does the same as soon as a text is longer than the
window, because each new token then changes every token's position in the window.

A `Generator` keeps its compiled programs. Lengths are padded, so that calls share a program unless
they differ in the number of prompts, in the settings of sampling, or by more than `PIECE` tokens.

Dims: B texts, N tokens of the longest text, W window, L positions of a forward pass, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.models.functional import Functional
from jaxdist.train import decode
from jaxdist.train.sampling import Sampling
from jaxdist.train.step import Program
from jaxdist.types import Buffers, Params, PyTree

PIECE = 64
"""The number that divides the padded lengths of prompts, texts and caches, so that few shapes are
compiled and products are exact."""


class Text(NamedTuple):
    """A prompt and its continuation.

    Attributes:
      tokens: the tokens of the prompt and of the continuation. If a stop token ended the text, the
        stop token is the last token.
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
      number: the number of tokens added so far to each text that is not done, int32.
      cache: the keys and values, or None without a cache.
    """

    tokens: jax.Array
    length: jax.Array
    logits: jax.Array
    nats: jax.Array
    done: jax.Array
    number: jax.Array
    cache: PyTree


class _Limits(NamedTuple):
    """The conditions that end a loop, and the random key, which are arguments of a compiled loop.

    Attributes:
      most: the maximum number of tokens to add to a prompt, int32.
      stops: the tokens that end a text, int32 `[S]`.
      key: the random key of the choices.
    """

    most: jax.Array
    stops: jax.Array
    key: jax.Array


@dataclass(frozen=True, eq=False)
class Generator:
    """A model that continues prompts; all calls share the compiled programs.

    Attributes:
      window: the length of the sequences that the model was trained on.
      vocab_size: the number of tokens in the vocabulary, without the padding of the head.
      cached: whether a decoder may cache its keys and values.
      separate_bytes: the least size of a layer on CPUs whose parameters a compiled loop reads as
        separate arrays.
    """

    program: Program
    window: int
    vocab_size: int
    cached: bool = True
    separate_bytes: int = decode.SEPARATE_BYTES

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        *,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling,
        stops: Collection[int] = (),
        log_probs: bool = False,
    ) -> list[Text]:
        """Continue each prompt by at most `count` tokens, and return the texts.

        Each added token depends on at most `window` tokens before it. With `log_probs`, the forward
        pass of training runs once on the finished texts, in the shapes of training. Up to the
        length of the window, the log-probabilities are therefore bit-identical to the
        log-probabilities of training.

        Args:
          params: the parameters, in the form in which the program stores them.
          prompts: the tokens of each prompt, at least one token.
          count: the maximum number of tokens to add to a prompt.
          stops: the tokens that end a text.
          log_probs: whether to compute log-probabilities.
        """
        layout = self.program.layout
        rows = -(-len(prompts) // layout.data_size) * layout.data_size
        # Rows are padded with copies of the last prompt, which are cut off at the end.
        filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
        lengths = np.array([len(p) for p in filled], np.int32)
        longest = int(max(lengths))
        tokens = np.zeros((rows, _padded(longest + count)), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt)] = prompt
        batch = layout.sharding(("batch",))
        placed = jax.device_put(tokens, batch), jax.device_put(lengths, batch)
        ends = jnp.asarray([*stops] or [-1], jnp.int32)
        limits = _Limits(jnp.int32(count), ends, jax.random.key(sampling.seed))
        merged, loop = self._merged(params), None
        if self._caches and longest <= self.window:
            ahead = min(self.window, _padded(longest))
            size = max(ahead, min(self.window, tokens.shape[1]))
            loop = self._begin(merged, buffers, *placed, ahead, size)
            given = merged, buffers, decode.layer_views(merged, least=self.separate_bytes)
            loop = self._loop(*given, loop, limits, sampling)._replace(cache=None)
        if loop is None:
            loop = self._begin_whole(merged, buffers, *placed)
        if int(loop.number) < count and not bool(loop.done.all()):
            loop = self._loop(merged, buffers, (), loop, limits, sampling)
        nats = self._scored(merged, buffers, loop) if log_probs else loop.nats
        arrays = map(np.asarray, (loop.tokens, loop.length, nats, loop.done))
        texts = []
        # `zip` is not strict: the arrays also have the copies of the last prompt that pad the
        # batch.
        for prompt, tokens_N, length, nats_N, done in zip(prompts, *arrays, strict=False):
            added = nats_N[len(prompt) : length].tolist() if log_probs else None
            texts.append(Text(tokens_N[:length].tolist(), added, bool(done)))
        return texts

    @cached_property
    def _model(self) -> Functional:
        return replace(self.program.model, adapters=())

    @cached_property
    def _caches(self) -> bool:
        reason = decode.reason_against(self._model, self.program.layout)
        return self.cached and reason is None

    @cached_property
    def _merged(self) -> Any:
        """A function that merges adapters into the stored parameters of the model."""
        home, model = self.program.home, self.program.model
        if not home.views and not model.adapters:
            return lambda params: params
        return jax.jit(lambda params: model.merged(home.used.params(params)))

    @cached_property
    def _begin(self) -> Any:
        """A compiled function that returns the state after the prompts, with a cache.

        The last two arguments of the function are two numbers of positions: the positions of the
        prompts to compute now, and all positions for which the cache has room.
        """

        def begin(
            params: Params, buffers: Buffers, tokens_BN: jax.Array, length_B: jax.Array,
            ahead: int, size: int,
        ) -> _Loop:  # fmt: skip
            module = self._bound(params, buffers)
            tokens_BL = tokens_BN[:, :ahead]
            at_BL = jnp.broadcast_to(jnp.arange(ahead)[None], tokens_BL.shape)
            cache = decode.empty_cache(module, tokens_BN.shape[0], size)
            x_BLD, cache = decode.decode(module, tokens_BL, at_BL, cache, window=self.window)
            last_B11 = length_B[:, None, None] - 1
            logits_BV = module.head(jnp.take_along_axis(x_BLD, last_B11, 1))[:, 0]
            return self._begun(tokens_BN, length_B, self._cut(logits_BV), cache)

        return jax.jit(begin, static_argnums=(4, 5))

    @cached_property
    def _begin_whole(self) -> Any:
        """A compiled function that returns the state after the prompts, without a cache."""

        def begin(
            params: Params, buffers: Buffers, tokens_BN: jax.Array, length_B: jax.Array
        ) -> _Loop:
            nothing = jnp.zeros((len(tokens_BN), self.vocab_size), jnp.float32)
            loop = self._begun(tokens_BN, length_B, nothing, None)
            return loop._replace(logits=self._step(params, buffers, loop)[0])

        return jax.jit(begin)

    def _begun(
        self, tokens_BN: jax.Array, length_B: jax.Array, logits_BV: jax.Array, cache: PyTree
    ) -> _Loop:
        nats_BN, done_B = jnp.zeros(tokens_BN.shape, jnp.float32), jnp.zeros(len(length_B), bool)
        return _Loop(tokens_BN, length_B, logits_BV, nats_BN, done_B, jnp.int32(0), cache)

    def _step(
        self, params: Params, buffers: Buffers, loop: _Loop, layers: Sequence[Params] = ()
    ) -> tuple[jax.Array, PyTree]:
        """Return the logits of the next token, and the next cache."""
        if loop.cache is not None:
            module, at_B1 = self._bound(params, buffers), loop.length[:, None] - 1
            token_B1 = jnp.take_along_axis(loop.tokens, at_B1, 1)
            given = token_B1, at_B1, loop.cache
            x_B1D, cache = decode.decode(module, *given, window=self.window, layers=layers)
            return self._cut(module.head(x_B1D)[:, 0]), cache
        missing = max(0, self.window - loop.tokens.shape[1])
        tokens_BN = jnp.pad(loop.tokens, ((0, 0), (0, missing)))
        begin_B1 = jnp.maximum(loop.length[:, None] - self.window, 0)
        tokens_BL = jnp.take_along_axis(tokens_BN, begin_B1 + jnp.arange(self.window)[None], 1)
        logits_BLV = self._bound(params, buffers)(tokens_BL, jnp.zeros_like(tokens_BL))
        last_B11 = jnp.minimum(loop.length, self.window)[:, None, None] - 1
        return self._cut(jnp.take_along_axis(logits_BLV, last_B11, 1)[:, 0]), None

    @cached_property
    def _loop(self) -> Any:
        """A compiled loop over tokens; the loop donates its state.

        The loop ends when all tokens are added, when all texts are done, or when a text fills the
        window and the state has a cache.
        """

        def run(
            params: Params, buffers: Buffers, layers: Sequence[Params],
            loop: _Loop, limits: _Limits, sampling: Sampling,
        ) -> _Loop:  # fmt: skip
            def goes_on(loop: _Loop) -> jax.Array:
                longest = jnp.where(loop.done, 0, loop.length).max()
                fits = True if loop.cache is None else longest < self.window
                return ~loop.done.all() & (loop.number < limits.most) & fits

            def add(loop: _Loop) -> _Loop:
                token_B = sampling.draw(loop.logits, loop.number, limits.key)
                nats_B = -optax.softmax_cross_entropy_with_integer_labels(loop.logits, token_B)
                rows = jnp.arange(len(token_B))
                # The index of a text that is done is outside of its buffer, so jax drops the write.
                at_B = jnp.where(loop.done, loop.tokens.shape[1], loop.length)
                added = loop._replace(
                    tokens=loop.tokens.at[rows, at_B].set(token_B, mode="drop"),
                    nats=loop.nats.at[rows, at_B].set(nats_B, mode="drop"),
                    length=loop.length + ~loop.done,
                    done=loop.done | (token_B[:, None] == limits.stops[None]).any(-1),
                    number=loop.number + 1,
                )
                logits_BV, cache = self._step(params, buffers, added, layers)
                return added._replace(logits=logits_BV, cache=cache)

            return jax.lax.while_loop(goes_on, add, loop)

        return jax.jit(run, donate_argnums=3, static_argnums=5)

    def _scored(self, params: Params, buffers: Buffers, loop: _Loop) -> jax.Array:
        """Return the log-probabilities `[B, N]` of texts, from the forward pass of training."""
        rows = self.program.layout.data_size
        pieces = [
            self._score(params, buffers, loop.tokens[i : i + rows])
            for i in range(0, len(loop.tokens), rows)
        ]
        nats_BL = jnp.concatenate(pieces)
        # The log-probabilities of tokens beyond the window were computed in the loop, each by a
        # forward pass over a separate window.
        return jnp.concatenate([nats_BL, loop.nats[:, nats_BL.shape[1] :]], 1)

    @cached_property
    def _score(self) -> Any:
        """A compiled function from texts to the log-probabilities of their first tokens."""

        def score(params: Params, buffers: Buffers, tokens_BN: jax.Array) -> jax.Array:
            missing = max(0, self.window + 1 - tokens_BN.shape[1])
            tokens_BL = jnp.pad(tokens_BN, ((0, 0), (0, missing)))[:, : self.window + 1]
            inputs_BL, module = tokens_BL[:, :-1], self._bound(params, buffers)
            given = inputs_BL, jnp.zeros_like(inputs_BL)
            head = getattr(module, "padded_head", None)
            logits_BLV = module(*given) if head is None else head(module.hidden(*given))
            nats_BL = optax.softmax_cross_entropy_with_integer_labels(
                logits_BLV.astype(jnp.float32), tokens_BL[:, 1:]
            )
            return -jnp.pad(nats_BL, ((0, 0), (1, 0)))[:, : tokens_BN.shape[1]]

        return jax.jit(score)

    def _bound(self, params: Params, buffers: Buffers) -> Any:
        module: Any = self._model.bind(params, buffers)
        module.eval()
        return module

    def _cut(self, logits_BV: jax.Array) -> jax.Array:
        return logits_BV[:, : self.vocab_size].astype(jnp.float32)


def _padded(length: int) -> int:
    """Round a length up to a multiple of `PIECE`."""
    return -(-length // PIECE) * PIECE
