"""What ended a run, in one word, in words, and as fields of status.json.

| reason        | what it was                                                       |
|---------------|-------------------------------------------------------------------|
| user          | a setting or file that the user can mend (`UserError`)            |
| diverged      | a loss or gradient that is no number                              |
| out_of_memory | of the device or of the host; the system's own killer leaves none |
| disk          | a disk that is full, gone or not to be written to                 |
| lost          | another rank that ended without a word, as when it was killed     |
| error         | anything else, with a traceback                                   |
"""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Any

from harness.errors import EXIT_FAILED, EXIT_USER, PeerFailed, RunFailed, UserError

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
}
# How torch says it in plain RuntimeErrors: of the host's memory, and of a GPU's outside of its allocator.
_NO_MEMORY = (
    "can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",  # of compiled kernels
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # of NCCL, in an error of a collective
)  # fmt: skip


def reason_of(error: BaseException) -> str:
    """The word of the table above."""
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, RunFailed):
        return error.reason
    if _is_out_of_memory(error):
        return "out_of_memory"
    return "disk" if isinstance(error, OSError) and error.errno in _DISK_ERRORS else "error"


def exit_code(error: BaseException) -> int:
    """What a single run exits with; where another rank failed, what that one does."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, PeerFailed):
        return int(error.fields.get("exit_code", EXIT_FAILED))
    return EXIT_USER if isinstance(error, UserError) else EXIT_FAILED


def in_words(error: BaseException) -> str | None:
    """The error as its user reads it; None where it is a fault of ours, which needs its traceback."""
    if isinstance(error, UserError | RunFailed):
        return str(error)
    reason = reason_of(error)
    if reason == "out_of_memory":
        from harness.commandline.commands import command

        return (
            f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}. Fewer "
            "sequences at once give the same step in less, trainer.micro_batch_size=N: "
            f"{command('find_batch')} finds what fits; check=true says what the weights alone need"
        )
    if reason == "disk":
        assert isinstance(error, OSError)
        # Of a rename the name that was to be, not our temporary one.
        where = error.filename2 or error.filename
        what = f"{where}: {error.strerror}" if where else str(error)
        return f"{what}. What was saved before is intact."
    inner = _of_compiler(error)
    if inner is not None:
        return (
            f"torch.compile failed: {type(inner).__name__}: {_first_line(inner)}. Mostly what it lacks "
            "here is a C compiler (gcc) or Python's headers (python3-dev); compile=false trains without, "
            "slower. A run's train.log has the traceback"
        )
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def cause(error: Exception) -> Exception | None:
    """What the words are raised from: what the user did has no traceback that would help."""
    return None if isinstance(error, UserError | RunFailed) else error


def fields(error: BaseException) -> dict[str, Any]:
    """What status.json says of it; where another rank failed, what that one said of itself, and which."""
    own = {
        "exit_code": exit_code(error),
        "error": f"{type(error).__name__}: {error}",
        "reason": reason_of(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, PeerFailed):
        return {**own, **error.fields, "error": str(error), "rank": error.rank}
    return own


def _of_compiler(error: BaseException) -> BaseException | None:
    """What torch.compile met, where `error` is how it says so."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    if dynamo is None or not isinstance(error, dynamo.BackendCompilerFailed):
        return None
    inner: BaseException = error.inner_exception
    return inner


def _is_out_of_memory(error: BaseException) -> bool:
    inner = _of_compiler(error)
    if inner is not None:
        return _is_out_of_memory(inner)
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
