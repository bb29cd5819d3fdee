"""What a worker's child process does: load the function, build operands from case strings, call, and answer.

Also copies of itself, made before the function was ever called, for calls that are the first of their process.
"""

import inspect
import json
import os
import select
import shutil
import signal
import threading
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.run import runner as running
from parity.run.frames import roomy
from parity.run.implementation import Implementation
from parity.run.loading import SpecError, resolve_name
from parity.run.operation import find, parse_case


@roomy
def serve(read: int, write: int, folder: str) -> None:
    """Answer messages until the pipe closes: the parent is gone, however it went."""
    threading.Thread(target=_end_with_parent, args=(read, folder), daemon=True).start()
    with os.fdopen(read, "rb") as incoming:
        for line in incoming:
            message = json.loads(line)
            answer = _in_a_copy(message) if message.get("fresh") else _answered(message)
            os.write(write, json.dumps(answer).encode() + b"\n")
    _end(folder)


def _answered(message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a message, also where the function or its import raised something."""
    try:
        return _answer(message)
    except BaseException as error:  # also SystemExit: a function that exits must not look like a clean end
        problem = _problem(message, error)
        return {"problem": problem} if message["do"] == "describe" else _without_result(problem)


def _without_result(problem: str) -> dict[str, Any]:
    failed = _plain(running.Outcome(error=problem))
    return {"problem": problem, "outcome": failed, "outcomes": [failed], "tensors": False}


def _end_with_parent(read: int, folder: str) -> None:
    """Also out of a call that does not return."""
    closed = select.poll()
    closed.register(read, 0)  # nothing but that the other side has been closed
    closed.poll()
    _end(folder)


def _end(folder: str) -> None:
    """Remove the folder that the parent would have removed, and end the process with what the function has started."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _problem(message: dict[str, Any], error: BaseException) -> str:
    if isinstance(error, SpecError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the function called sys.exit({error.code!r})"
    if message["do"] == "describe":
        return f"impl: importing {message['spec']} failed: {running.sentence(error)}"
    return running.sentence(error)


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    if message["do"] == "hello":
        return {"pid": os.getpid()}
    function = resolve_name(message["spec"])
    parameters = _parameters(function)
    if message["do"] == "describe":
        contract = getattr(function, "parity_contract", None)
        if contract is not None and not isinstance(contract, dict):
            raise SpecError(
                f"impl: parity_contract of {message['spec']} is a {type(contract).__name__}, expected a dict"
            )
        return {"parameters": parameters, "contract": _json_only(contract, message["spec"])}
    impl = _implementation(message, parameters)
    device = torch.device(message["device"])
    if message["do"] == "sequence":
        return _sequence(impl, function, message, device)
    if message["do"] == "replay":
        wide, narrow = parse_case(message["wide"]), parse_case(message["narrow"])
        outcome = running.replay(impl, function, wide, narrow, device)
    else:
        operands = impl.operation.build(parse_case(message["case"]), device)
        options = {key: message[key] for key in ("measure", "repeats", "dry")}
        outcome = running.execute(impl, function, operands, **options)
    tensors = _tensors(outcome)
    if tensors:
        torch.save(tensors, message["path"])
    return {"outcome": _plain(outcome), "tensors": bool(tensors)}


def _sequence(impl: Implementation, function: Any, message: dict[str, Any], device: torch.device) -> dict[str, Any]:
    outcomes = running.run_sequence(impl, function, [parse_case(text) for text in message["cases"]], device)
    tensors = {
        str(at): running.over_tensors(_on_host, outcome.output)
        for at, outcome in enumerate(outcomes)
        if outcome.output is not None
    }
    if tensors:
        torch.save(tensors, message["path"])
    return {"outcomes": [_plain(outcome) for outcome in outcomes], "tensors": bool(tensors)}


def _in_a_copy(message: dict[str, Any]) -> dict[str, Any]:
    """The answer of a copy of this process, which has loaded no function of a user's and has no CUDA context."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # the threads of a pool do not come along
        answer = _answered(message | {"fresh": False})
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    code = os.waitstatus_to_exitcode(status)
    reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return _without_result(f"a process in which it was first called {reason}")


def _json_only(contract: Any, spec: str) -> Any:
    try:
        return json.loads(json.dumps(contract))
    except TypeError as error:
        raise SpecError(
            f"impl: parity_contract of {spec} must hold only strings, numbers, booleans and lists: {error}"
        ) from error


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # compiled functions without a signature take the convention's arguments
        return []


def _implementation(message: dict[str, Any], parameters: list[str]) -> Implementation:
    named = message["op"].partition(".")[0]
    contract = Contract(layout=message["layout"], op=named, schedule_meta=message["schedule_meta"])
    return Implementation(
        name=message["spec"],
        op=find(message["op"]).name,
        layout=message["layout"],
        contract=contract,
        parameters=frozenset(parameters),
        spec=message["spec"],
    )


def _plain(outcome: running.Outcome) -> dict[str, Any]:
    hidden = ("output", "operands", "differing", "kept")
    return {name: value for name, value in vars(outcome).items() if name not in hidden}


def _tensors(outcome: running.Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if outcome.output is not None:
        found["output"] = running.over_tensors(_on_host, outcome.output)
    if outcome.differing is not None:
        found["run"], found["differing"] = outcome.differing[0], running.over_tensors(_on_host, outcome.differing[1])
    return found


def _on_host(value: torch.Tensor) -> torch.Tensor:
    # Cloned: a view would carry its whole storage into the file.
    return value.detach().cpu().contiguous().clone()
