"""`python -m bertscope`."""

from bertscope.cli import main

if __name__ == "__main__":
    main()
