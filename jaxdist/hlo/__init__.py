"""The analysis of compiled programs: their collectives, the bytes sent, FLOPs and memory."""

from jaxdist.hlo.ledger import (
    compile_with_text,
    ledger,
    ledger_of_text,
    program_memory,
    program_text,
)
from jaxdist.hlo.parse import LedgerError
from jaxdist.hlo.records import Collective, CollectiveKind, Ledger, Memory
from jaxdist.hlo.refusal import is_too_large, refused_bytes

__all__ = [
    "Collective",
    "CollectiveKind",
    "Ledger",
    "LedgerError",
    "Memory",
    "compile_with_text",
    "is_too_large",
    "ledger",
    "ledger_of_text",
    "program_memory",
    "program_text",
    "refused_bytes",
]
