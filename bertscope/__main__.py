"""The program: `bertscope`, and `python -m bertscope`."""

import os
import sys

if __name__ == "__main__" and os.path.dirname(os.path.dirname(os.path.abspath(__file__))) != sys.path[0]:
    del sys.path[0]  # `python -m` puts the working directory there, where any file could replace a module

import signal


def leave_at_once(number: int, frame: object) -> None:
    """End a process that has done nothing yet as a shell reports the signal."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line; report errors during its import like later ones."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave_at_once)
    try:
        from bertscope.commands.exit_codes import run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run(_command_line)


def _command_line() -> int:
    from bertscope import cli

    return cli.start()


if __name__ == "__main__":
    main()
