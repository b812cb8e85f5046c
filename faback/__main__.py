"""`python -m faback`: the command line."""

from faback.cli import main

if __name__ == "__main__":
    main()
