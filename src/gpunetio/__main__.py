"""`python -m gpunetio`."""

from .cli import main

main()
