"""Programs of ticks, written by hand: a forward and a backward conditional, and a transfer."""

from jaxdist.hlo.parse import parse

PATH = "jit(f)/while/body/"
"""Of the tick's body, as jax writes it."""


def work(name, cycles, *, source=""):
    """An instruction that takes so many cycles."""
    metadata = f', metadata={{op_name="{source}"}}' if source else ""
    config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
    return f"%{name} = f32[8] copy(%p){metadata}, {config}"


def branch(conditional, number, cycles, *, inner=()):
    """The computation of a branch: work of so many cycles, and what stands in it."""
    name = conditional.replace("/", ".")
    scopes = f"/cond/branch_{number}_fun/".join(f"tick.{s}" for s in conditional.split("/"))
    source = f"{PATH}{scopes}/cond/branch_{number}_fun/add"
    lines = ["%p = f32[8] parameter(0)", *inner, work(f"{name}.{number}", cycles, source=source)]
    lines[-1] = f"ROOT {lines[-1]}"
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name}.branch.{number} (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def conditional(name, count, *, outer=1):
    """A conditional of so many branches, in the branch `outer` of the one that encloses it."""
    dotted = name.replace("/", ".")
    scopes = f"/cond/branch_{outer}_fun/".join(f"tick.{s}" for s in name.split("/"))
    branches = ", ".join(f"%{dotted}.branch.{number}" for number in range(count))
    return [
        f"%{dotted}.index = s32[] parameter(1)",
        f"%{dotted} = f32[8] conditional(%{dotted}.index{', %p' * count}), "
        f'branch_computations={{{branches}}}, metadata={{op_name="{PATH}{scopes}/cond"}}',
    ]


def ticked(branches, *, ticks, every=2, outside=5, nested=None, trips=None):
    """A program with a loop of ticks.

    Args:
      branches: by conditional, the cycles of each of its branches.
      every: cycles in each turn, whatever is taken.
      outside: cycles before the loop, and after it.
      nested: by conditional's name, the conditionals (with branches) inside its branch 1.
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
