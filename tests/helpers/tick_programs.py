"""Texts of programs with a loop over ticks, which have conditionals and a transfer."""

from jaxdist.hlo.parse import parse

PATH = "jit(f)/while/body/"
"""The beginning of the scope names in the body of the loop, as jax writes the names."""


def work(name, cycles, *, source=""):
    """Return an instruction with an estimate of `cycles`."""
    metadata = f', metadata={{op_name="{source}"}}' if source else ""
    config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
    return f"%{name} = f32[8] copy(%p){metadata}, {config}"


def branch(conditional, number, cycles, *, inner=()):
    """Return the computation of a branch, with the lines `inner` and an instruction of `cycles`."""
    name = conditional.replace("/", ".")
    scopes = f"/cond/branch_{number}_fun/".join(f"tick.{s}" for s in conditional.split("/"))
    source = f"{PATH}{scopes}/cond/branch_{number}_fun/add"
    lines = ["%p = f32[8] parameter(0)", *inner, work(f"{name}.{number}", cycles, source=source)]
    lines[-1] = f"ROOT {lines[-1]}"
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name}.branch.{number} (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def conditional(name, count, *, outer=1):
    """Return a conditional of `count` branches, in branch `outer` of its enclosing conditional."""
    dotted = name.replace("/", ".")
    scopes = f"/cond/branch_{outer}_fun/".join(f"tick.{s}" for s in name.split("/"))
    branches = ", ".join(f"%{dotted}.branch.{number}" for number in range(count))
    return [
        f"%{dotted}.index = s32[] parameter(1)",
        f"%{dotted} = f32[8] conditional(%{dotted}.index{', %p' * count}), "
        f'branch_computations={{{branches}}}, metadata={{op_name="{PATH}{scopes}/cond"}}',
    ]


def ticked(branches, *, ticks, every=2, outside=5, nested=None, trips=None):
    """Return a parsed program with a loop over ticks.

    Args:
      branches: the cycles of each branch, by conditional.
      ticks: the number of iterations of the loop.
      every: the cycles of each iteration outside of the conditionals.
      outside: the cycles before the loop, and after the loop.
      nested: the cycles of each branch of the conditionals inside of branch 1, by the name
        `OUTER/INNER`.
      trips: the number of iterations that the program states, or None for `ticks`.
    """
    texts, body = [], []
    for name, cycles in branches.items():
        for number, count in enumerate(cycles):
            inner = []
            for within, own in (nested or {}).items() if number == 1 else ():
                if within.split("/")[0] == name:
                    inner += conditional(within, len(own))
                    texts += [branch(within, n, c) for n, c in enumerate(own)]
            texts.append(branch(name, number, count, inner=inner))
        body += conditional(name, len(cycles))
    lines = "\n".join(f"  {line}" for line in (*body, work("each", every)))
    count = f', backend_config={{"known_trip_count":{{"n":"{trips or ticks}"}}}}'
    return parse(
        "HloModule m, num_partitions=4\n\n" + "\n".join(texts) + "\n"
        "%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %q = (s32[], f32[8]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%q), index=0\n"
        "  %p = f32[8] get-tuple-element(%q), index=1\n"
        f"{lines}\n"
        "  ROOT %n = (s32[], f32[8]) tuple(%i, %each)\n}\n\n"
        "%condition (s: (s32[], f32[8])) -> pred[] {\n"
        "  %cq = (s32[], f32[8]) parameter(0)\n"
        "  ROOT %go = pred[] constant(true)\n}\n\n"
        "ENTRY %main () -> f32[8] {\n"
        "  %p = f32[8] parameter(0)\n"
        "  %s0 = (s32[], f32[8]) parameter(1)\n"
        f"  {work('before', outside)}\n"
        f"  %l = (s32[], f32[8]) while(%s0), condition=%condition, body=%body{count}\n"
        f"  ROOT {work('after', outside)}\n}}\n"
    )
