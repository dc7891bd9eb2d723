"""The program: `bertscope`, and `python -m bertscope`."""


def main() -> None:
    """Run the command line; an interrupt while it is still being imported ends as quietly as a later one."""
    try:
        from bertscope import cli
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    cli.main()


if __name__ == "__main__":
    main()
