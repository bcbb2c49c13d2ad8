"""The entry point: nothing but this is imported before an interrupt is provided for."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Runs `sys.argv`; exits with 0, with 2 after one line about bad input, with 130 when interrupted."""
    try:
        from jaxsim.command import command

        code = command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
