"""The encoding of vectors as integers modulo 2^64, and the pseudorandom masks of vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxdist.errors import RunError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

FRACTION_BITS = 32
"""The number of fractional bits of a fixed-point number."""
CHUNK_WORDS = 2**15
"""The number of words of a mask that are computed at once, so that the words stay in the
processor's cache."""


class SecureError(RunError):
    """The error for a round of secure aggregation that cannot be completed."""


def check_installed() -> None:
    """Check that the package of the cryptographic primitives is installed.

    Raises:
      SecureError: the package is not installed.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise SecureError(
            "secure aggregation needs the package cryptography: pip install 'jaxdist[secure]'"
        ) from None


def encode(x: np.ndarray, clients: int, weight: float = 1.0) -> np.ndarray:
    """Return `weight * x`, rounded to fixed point, as integers modulo 2^64.

    Args:
      clients: the number of vectors in the sum; the sum must not exceed the range of the integers.

    Raises:
      SecureError: an element is not finite, or the sum of the clients' elements could wrap around.

    >>> decode(encode(np.array([0.25, -3.0]), 2) + encode(np.array([1.0, 1.0]), 2))
    array([ 1.25, -2.  ])
    """
    # The products are in float64. The 53 bits of its precision are enough for the integers, and the
    # 24 bits of float32 are not.
    scaled = np.rint(x.astype(np.float64) * weight * 2.0**FRACTION_BITS)
    bound = 2.0**63 / clients
    largest = float(np.max(np.abs(scaled), initial=0.0))
    if not largest < bound:
        raise SecureError(
            f"a value times its weight has magnitude {largest / 2.0**FRACTION_BITS:.3g}, but "
            f"secure aggregation of {clients} clients needs magnitudes below "
            f"{bound / 2.0**FRACTION_BITS:.3g}: scale down the loss or its weights"
        )
    return scaled.astype(np.int64).view(np.uint64)


def decode(total: np.ndarray) -> np.ndarray:
    """Return a sum of encoded vectors as float64."""
    return total.view(np.int64) / 2.0**FRACTION_BITS


def add_mask(into: np.ndarray, key: bytes, *, subtract: bool = False) -> None:
    """Add the mask of a key to integers modulo 2^64, in place; the mask is from AES-256-CTR.

    Args:
      into: the integers, uint64 `[n]`.
      key: the key of the mask.
      subtract: whether the mask is subtracted instead of added.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * CHUNK_WORDS)
    raw = bytearray(8 * CHUNK_WORDS + 16)  # `update_into` requires room for one more block.
    words = np.frombuffer(raw, np.uint64)
    for start in range(0, into.size, CHUNK_WORDS):
        part = into[start : start + CHUNK_WORDS]
        stream.update_into(memoryview(zeros)[: 8 * part.size], raw)
        if subtract:
            part -= words[: part.size]
        else:
            part += words[: part.size]


def agreed_key(own: X25519PrivateKey, public: bytes, use: str) -> bytes:
    """Return the key that two clients agree on, for one use: X25519, then HKDF with SHA-256.

    Args:
      own: the private key of one client.
      public: the public key of the other client.
      use: the name of the use; keys for different uses are independent.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = own.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), 32, None, f"jaxdist {use}".encode()).derive(secret)
