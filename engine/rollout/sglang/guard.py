"""What an SGLang server must not be asked to be: settings under which its tokens, log-probs or versions would lie.

Each check returns the reason in words, "" if there is none, or raises Unsupported for a server that runs already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.rollout.loading import PauseMode
from engine.rollout.sglang.api import ServerInfo
from engine.rollout.sglang.errors import Unsupported

_OURS = ("--model-path", "--model", "--host", "--port")  # Server gives these
_EXACT_IN_PLACE = ("--disable-overlap-schedule", "--disable-radix-cache")
_DATA_PARALLEL = ("--dp-size", "--data-parallel-size", "--dp")
_TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp")
_PIPELINE = ("--pp-size", "--pipeline-parallel-size", "--pp")

# Log-probs at temperature 1 instead of the one sampled at: training would correct for a policy that never acted.
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def in_place_is_exact(args: Sequence[str]) -> str:
    """Why pause mode "in_place" would mislabel tokens under these arguments of launch_server; "" if it would not.

    With overlapped batches the token in flight at the pause is made by the old weights and labelled with the new
    ones; with the prefix cache later requests read keys and values of old weights (both measured, release 0.5.23).
    """
    missing = [flag for flag in _EXACT_IN_PLACE if flag not in _flags(args)]
    if not missing:
        return ""
    return f"needs {' and '.join(missing)}: without them the server labels tokens with weights that did not make them"


def refused_args(args: Sequence[str]) -> str:
    """Why these arguments of launch_server cannot be handed on; "" if they can."""
    given = _flags(args)
    ours = [flag for flag in _OURS if flag in given]
    if ours:
        return f"{ours[0]} is set by the daemon itself; remove it"
    parallel = next((flag for flag in _DATA_PARALLEL if given.get(flag, "1") not in ("", "1")), "")
    if parallel:
        return (
            f"{parallel} {given[parallel]}: SGLang updates the weights of one data-parallel rank only; "
            "use rollout.replicas instead"
        )
    return ""


def tensor_ranks(args: Sequence[str]) -> int:
    """That a server with these arguments will have."""
    given = _flags(args)
    size = next((given[flag] for flag in _TENSOR_PARALLEL if flag in given), "")
    return int(size) if size.isdecimal() and int(size) else 1


def refused_group(args: Sequence[str]) -> str:
    """Why a server with these arguments can be in no transfer group; "" if it can."""
    given = _flags(args)
    stages = next((flag for flag in _PIPELINE if given.get(flag, "1") not in ("", "1")), "")
    return (
        f"{stages} {given[stages]}: SGLang gives the stages of a pipeline one rank in a group"
        if stages
        else ""
    )


def group_ranks(info: ServerInfo) -> int:
    """That a running server brings to a transfer group; 0: it can be in none."""
    return info.tp_size if info.raw.get("pp_size", 1) in (1, None) else 0


def refused_env(env: Mapping[str, str]) -> str:
    """Why these variables of the server cannot be handed on; "" if they can."""
    if env.get(ORIGINAL_LOGPROB, "").lower() in ("", "0", "false"):
        return ""
    return (
        f"{ORIGINAL_LOGPROB} = {env[ORIGINAL_LOGPROB]}: log-probs must be those of the temperature sampled at"
    )


def check_server(info: ServerInfo, mode: PauseMode) -> None:
    """Raise Unsupported for a running server whose weights cannot be updated truthfully in this pause mode."""
    if info.dp_size != 1:
        raise Unsupported(
            f"the server has {info.dp_size} data-parallel ranks, and SGLang updates weights with one only; start it "
            f"with --dp-size 1"
        )
    if mode == "in_place":
        flags = [flag for flag in _EXACT_IN_PLACE if info.raw.get(_attribute(flag)) is not True]
        if flags:
            raise Unsupported(
                f'rollout.pause_generation_mode = "in_place" needs a server with {" and ".join(flags)}: without them '
                f"it labels tokens with weights that did not make them"
            )


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flags(args: Sequence[str]) -> dict[str, str]:
    """Flag → its value, "" if it has none, as argparse would read them; `_` and `-` are the same."""
    found: dict[str, str] = {}
    last = ""
    for arg in args:
        if arg.startswith("--"):
            name, _, value = arg.partition("=")
            last = name.replace("_", "-")
            found[last] = value
        elif last:
            found[last], last = arg, ""
    return found
